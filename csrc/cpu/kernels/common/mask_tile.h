// Masks on a tile of S^T: keys down, lanes over queries. Key ranges come from csrc/core/mask.h; mask tensors are turned
// into an additive block, -inf where hidden. Where no number of it is -inf, it is only added (by_sum), and ALiBi alone
// needs no block (by_alibi; by_range adds it too where it is on).
#pragma once
#include "attention/params.h"
#include "cpu/kernels/attention/block_rows.h"
#include "pack.h"
#include "row_prefetch.h"
#include "units.h"

namespace attnjourney {
namespace {

enum class Hidden { no, by_range, by_bias, by_sum, by_alibi };

// For key j and rows first_row + lane: visible where from <= lane <= to.
template <class Real>
struct LaneRange {
  Real from, to;
  ATTN_INLINE typename Vec<Real>::Mask visible(Vec<Real> lane) const {
    return both(ge(lane, Vec<Real>::set(from)), ge(Vec<Real>::set(to), lane));
  }
};
template <class Real>
ATTN_INLINE LaneRange<Real> lane_range(const KeyRanges& keys, int64_t first_row, int64_t key) {
  constexpr int64_t far = 1 << 20;  // past every lane
  const KeyRange rows = keys.rows(key, key, first_row, first_row + far);
  return {Real(rows.begin - first_row), Real(rows.end - first_row - 1)};
}

ATTN_INLINE TileKeys tile_keys(const KeyRanges& keys, int64_t first, int64_t last, int64_t k0, int64_t n) {
  return keys.tile(first, last, k0, n);
}

// Which vectors of width rows, of `count` rows from first_row on, see any of the keys [key, key + n); `whole`: all of
// their rows see all of the keys.
struct SeenLanes {
  int64_t begin, end;
  bool whole;
};
template <int width>
ATTN_INLINE SeenLanes seen_lanes(const KeyRanges& keys, int64_t first_row, int64_t count, int64_t key, int64_t n) {
  const KeyRange rows = keys.rows(key, key + n - 1, first_row, first_row + count);
  if (rows.empty()) return {0, 0, false};
  SeenLanes s;
  s.begin = (rows.begin - first_row) / width;
  s.end = (rows.end - first_row + width - 1) / width;
  s.whole = keys.tile(first_row + s.begin * width, first_row + min_of(count, s.end * width) - 1, key, n).whole(n);
  return s;
}

// of those seen of a block the keys [from, to) of it
ATTN_INLINE TileKeys within(const TileKeys& seen, int64_t from, int64_t to) {
  TileKeys mine;
  mine.begin = max_of(seen.begin, from);
  mine.end = min_of(seen.end, to);
  mine.all_begin = max_of(mine.begin, min_of(seen.all_begin, mine.end));
  mine.all_end = max_of(mine.all_begin, min_of(seen.all_end, mine.end));
  return mine;
}

// A mask's numbers as they are, and whether one of them, -inf, hides a key.
template <class Real>
struct MaskValue {
  Vec<Real> low = Vec<Real>::zero();
  Real low_one = 0;
  ATTN_INLINE Vec<Real> operator()(Vec<Real> x) {
    low = min(x, low);  // a NaN is passed over
    return x;
  }
  ATTN_INLINE Real operator()(Real x) {
    low_one = x < low_one ? x : low_one;
    return x;
  }
  bool hides() const {
    const Real hidden = -Real(__builtin_inff());
    return low_one == hidden || any(eq(low, Vec<Real>::set(hidden)));
  }
};

// Whether any number of it may hide a key, as far as a look costs nothing.
template <class T, class Real>
ATTN_INLINE bool mask_block(const T* mask, int64_t row, int64_t col, int64_t rows, int64_t n, Real* bias,
                            int64_t bias_ld) {
  constexpr int width = Vec<Real>::width;
  if constexpr (sizeof(Compute<T>) == sizeof(Real)) {
    if (col == 1 && row != 0)
      return pack_transposed_by(mask, row, rows, n, MaskValue<Real>{}, bias, width, width, bias_ld).hides();
  }
  const int64_t lanes = round_up(rows, width);
  for (int64_t k = 0; k < n; k++) {
    if (row == 0) {  // one value for all rows: a padding mask
      const Vec<Real> v = Vec<Real>::set(Real(load_one(mask + k * col)));
      for (int64_t i = 0; i < lanes; i += width) store(bias + k * bias_ld + i, v);
    } else {
      for (int64_t i = 0; i < lanes; i++)
        bias[k * bias_ld + i] = i < rows ? Real(load_one(mask + i * row + k * col)) : Real(0);
    }
  }
  return true;
}

// added: as some_hidden, but not known to hide anything; summed: nothing is -inf but by the key ranges; alibi: there is
// no block, ALiBi is for the epilogue
enum class MaskBlock { all_visible, some_hidden, all_hidden, added, summed, alibi };
ATTN_INLINE bool has_block(MaskBlock block) {
  return block == MaskBlock::some_hidden || block == MaskBlock::added || block == MaskBlock::summed;
}
// whether the block's -inf hide keys
ATTN_INLINE bool may_hide(MaskBlock block) { return has_block(block) && block != MaskBlock::summed; }
ATTN_INLINE Hidden inside(MaskBlock block) {
  if (block == MaskBlock::summed) return Hidden::by_sum;
  if (block == MaskBlock::alibi) return Hidden::by_alibi;
  return has_block(block) ? Hidden::by_bias : Hidden::no;
}

template <Hidden H>
struct HiddenIs {
  static constexpr Hidden value = H;
};
// calls f(HiddenIs<hidden>)
template <class F>
ATTN_INLINE void with_hidden(Hidden hidden, F&& f) {
  switch (hidden) {
    case Hidden::by_bias:
      return f(HiddenIs<Hidden::by_bias>{});
    case Hidden::by_sum:
      return f(HiddenIs<Hidden::by_sum>{});
    case Hidden::by_alibi:
      return f(HiddenIs<Hidden::by_alibi>{});
    default:
      return f(HiddenIs<Hidden::no>{});
  }
}

// Whether a boolean block shows or hides everything, from its bytes.
ATTN_NOINLINE MaskBlock state_of(const mask_bool* mask, int64_t row, int64_t col, int64_t rows, int64_t n) {
  uint8_t any_set = 0, all_set = 1;
  const auto* bytes = reinterpret_cast<const uint8_t*>(mask);
  for (int64_t i = 0; i < (row == 0 ? 1 : rows); i++) {
    const uint8_t* x = bytes + i * row;
    if (col == 1) {
      for (int64_t k = 0; k < n; k++) any_set |= x[k] != 0, all_set &= x[k] != 0;
    } else {
      for (int64_t k = 0; k < (col == 0 ? 1 : n); k++) any_set |= x[k * col] != 0, all_set &= x[k * col] != 0;
    }
    if (any_set && !all_set) return MaskBlock::some_hidden;
  }
  return any_set ? MaskBlock::all_visible : MaskBlock::all_hidden;
}

// The same for a mask of blocks, from its lists. Blocks begin at a multiple of the vector.
template <class Real>
ATTN_NOINLINE MaskBlock load_blocks(const BlockRows& blocks, int64_t first, int64_t rows, int64_t k0, int64_t n,
                                    Real* bias, int64_t bias_ld) {
  constexpr int width = Vec<Real>::width;
  bool any = false, all = true;
  each_block(blocks, first, rows, k0, n, [&](int64_t, int64_t, int64_t, int64_t, const uint8_t* elements, bool seen) {
    any |= seen;
    all &= seen && !elements;
  });
  if (!any || all) return any ? MaskBlock::all_visible : MaskBlock::all_hidden;
  each_block(blocks, first, rows, k0, n,
             [&](int64_t r, int64_t r_end, int64_t k, int64_t k_end, const uint8_t* elements, bool seen) {
               if (elements) {
                 mask_block(reinterpret_cast<const mask_bool*>(elements), blocks.size, 1, r_end - r, k_end - k,
                            bias + k * bias_ld + r, bias_ld);
                 return;
               }
               const Vec<Real> value = seen ? Vec<Real>::zero() : Vec<Real>::set(-Real(__builtin_inff()));
               for (; k < k_end; k++)
                 for (int64_t i = r; i < r_end; i += width) store(bias + k * bias_ld + i, value);
             });
  return MaskBlock::some_hidden;
}

// Rows first .. first + rows - 1, keys k0 .. k0 + n - 1 of the mask tensor -> bias[key][lane].
// A boolean block that shows everything or nothing is recognised and not written.
template <class T, class Real>
ATTN_NOINLINE MaskBlock load_mask(const AttentionParams& params, const void* mask, int64_t first, int64_t rows,
                                  int64_t k0, int64_t n, Real* bias, int64_t bias_ld) {
  if (params.mask == MaskKind::blocks)
    return load_blocks(*static_cast<const BlockRows*>(mask), first, rows, k0, n, bias, bias_ld);
  const int64_t at = first * params.mask_row + k0 * params.mask_col;
  if (params.mask == MaskKind::boolean) {
    const mask_bool* elements = static_cast<const mask_bool*>(mask) + at;
    const MaskBlock state = state_of(elements, params.mask_row, params.mask_col, rows, n);
    if (state == MaskBlock::some_hidden) mask_block(elements, params.mask_row, params.mask_col, rows, n, bias, bias_ld);
    return state;
  }
  const auto load = [&](const auto* elements) {
    const bool hides = mask_block(elements, params.mask_row, params.mask_col, rows, n, bias, bias_ld);
    return hides ? MaskBlock::added : MaskBlock::summed;
  };
  return params.mask_fp32 ? load(static_cast<const float*>(mask) + at) : load(static_cast<const T*>(mask) + at);
}

// The same rows and keys of the mask tensor, to be prefetched; no steps where they are few.
template <class T>
ATTN_INLINE void prefetch_mask(const AttentionParams& params, const void* mask, int64_t first, int64_t rows, int64_t k0,
                               int64_t n, RowPrefetch& prefetch) {
  if (params.mask == MaskKind::none || params.mask == MaskKind::blocks || params.mask_row == 0 || params.mask_col != 1)
    return;
  const int64_t at = first * params.mask_row + k0;
  if (params.mask == MaskKind::boolean)
    prefetch.add(static_cast<const mask_bool*>(mask) + at, params.mask_row, n);
  else if (params.mask_fp32)
    prefetch.add(static_cast<const float*>(mask) + at, params.mask_row, n);
  else
    prefetch.add(static_cast<const T*>(mask) + at, params.mask_row, n);
  prefetch.start(rows);
}

// -inf into bias where the key ranges hide
template <class Real>
ATTN_NOINLINE void hide_by_range(const KeyRanges& keys, int64_t first, int64_t rows, int64_t k0, int64_t n, Real* bias,
                                 int64_t bias_ld) {
  constexpr int width = Vec<Real>::width;
  for (int64_t k = 0; k < n; k++) {
    const LaneRange<Real> range = lane_range<Real>(keys, first, k0 + k);
    for (int64_t i = 0; i < rows; i += width) {
      const auto visible = range.visible(Vec<Real>::iota() + Vec<Real>::set(Real(i)));
      store(bias + k * bias_ld + i,
            select(visible, load(bias + k * bias_ld + i), Vec<Real>::set(-Real(__builtin_inff()))));
    }
  }
}

// Adds the bias of ALiBi, factor * |first + offset + lane - key|, to bias (`fresh`: bias holds nothing yet). Lanes past
// the last row get 0, so that nothing overflows there.
template <class Real>
ATTN_NOINLINE void add_alibi(const KeyRanges& keys, Real factor, int64_t first, int64_t rows, int64_t k0, int64_t n,
                             bool fresh, Real* bias, int64_t bias_ld) {
  constexpr int width = Vec<Real>::width;
  const Vec<Real> factors = Vec<Real>::set(factor), last = Vec<Real>::set(Real(rows - 1)), zero = Vec<Real>::zero();
  for (int64_t k = 0; k < n; k++) {
    const Vec<Real> shift = Vec<Real>::set(Real(first + keys.offset - k0 - k));
    for (int64_t i = 0; i < rows; i += width) {
      const Vec<Real> lane = Vec<Real>::iota() + Vec<Real>::set(Real(i)), distance = lane + shift;
      const Vec<Real> added = select(ge(last, lane), factors * max(distance, zero - distance), zero);
      store(bias + k * bias_ld + i, fresh ? added : load(bias + k * bias_ld + i) + added);
    }
  }
}

// What distances are multiplied by: -slope in the unit of scores.
template <class Real>
ATTN_INLINE Real alibi_factor(const AttentionParams& params, const HeadPointers& head) {
  return Real(-head.slope * score_unit(params).scores);
}

// ALiBi in an epilogue: -slope * |distance| for keys against lanes, rounded as add_alibi rounds it.
template <class Real>
struct Alibi {
  Vec<Real> factor;
  Real shift;  // position of lane 0 less the block's first key
  bool on;     // in the epilogue
  ATTN_INLINE Vec<Real> distance(Vec<Real> lane, int64_t lane0, int64_t k) const {  // signed; one less for the next key
    return lane + Vec<Real>::set(shift + Real(lane0 - k));
  }
  ATTN_INLINE Vec<Real> add(Vec<Real> x, Vec<Real> distance) const {
    return x + factor * max(distance, Vec<Real>::zero() - distance);
  }
};
template <class Real>
ATTN_INLINE Alibi<Real> alibi_of(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t k0,
                                 MaskBlock masked) {
  return {Vec<Real>::set(alibi_factor<Real>(params, head)), Real(first + params.keys.offset - k0),
          masked == MaskBlock::alibi};
}

// The additive block of a tile: mask tensor, ALiBi and, unless nothing is hidden or added, the key ranges.
// bias points at key k0 of the block; `seen` is relative to k0. `Epilogue`: the caller knows by_sum and by_alibi.
template <class T, bool Epilogue = false, class Real>
ATTN_INLINE MaskBlock load_bias(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t rows,
                                int64_t k0, const TileKeys& seen, Real* bias, int64_t bias_ld) {
  MaskBlock masked = MaskBlock::all_visible;
  const int64_t n = seen.end - seen.begin;
  if (params.mask != MaskKind::none)
    masked = load_mask<T>(params, head.mask, first, rows, k0 + seen.begin, n, bias + seen.begin * bias_ld, bias_ld);
  if (masked == MaskBlock::all_hidden) return masked;
  if (params.alibi) {
    const bool fresh = !has_block(masked);
    if (Epilogue && fresh) return MaskBlock::alibi;
    add_alibi(params.keys, alibi_factor<Real>(params, head), first, rows, k0 + seen.begin, n, fresh,
              bias + seen.begin * bias_ld, bias_ld);
    if (fresh) masked = MaskBlock::summed;
  }
  if (has_block(masked)) {
    hide_by_range(params.keys, first, rows, k0 + seen.begin, seen.all_begin - seen.begin, bias + seen.begin * bias_ld,
                  bias_ld);
    hide_by_range(params.keys, first, rows, k0 + seen.all_end, seen.end - seen.all_end, bias + seen.all_end * bias_ld,
                  bias_ld);
  }
  return !Epilogue && masked == MaskBlock::summed ? MaskBlock::added : masked;
}

}  // namespace
}  // namespace attnjourney
