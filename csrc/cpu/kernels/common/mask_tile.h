// Masks on a tile of S^T: keys down, lanes over queries. Key ranges come from csrc/core/mask.h; mask tensors are turned
// into an additive block, -inf where hidden. Where no number of it is -inf, it is only added (by_sum), and ALiBi alone
// needs no block (by_alibi; by_range adds it too where it is on).
#pragma once
#include "attention/params.h"
#include "cpu/kernels/attention/block_rows.h"
#include "mask_prefetch.h"
#include "pack.h"

namespace attnjourney {
namespace {

enum class Hidden { no, by_range, by_bias, by_sum, by_alibi };

// For key j and rows first_row + lane: visible where from <= lane <= to.
template <class C>
struct LaneRange {
  C from, to;
  ATTN_INLINE typename Vec<C>::Mask visible(Vec<C> lane) const {
    return both(ge(lane, Vec<C>::set(from)), ge(Vec<C>::set(to), lane));
  }
};
template <class C>
ATTN_INLINE LaneRange<C> lane_range(const KeyRanges& keys, int64_t first_row, int64_t key) {
  constexpr int64_t far = 1 << 20;  // past every lane
  const KeyRange rows = keys.rows(key, key, first_row, first_row + far);
  return {C(rows.begin - first_row), C(rows.end - first_row - 1)};
}

ATTN_INLINE TileKeys tile_keys(const KeyRanges& keys, int64_t first, int64_t last, int64_t k0, int64_t n) {
  return keys.tile(first, last, k0, n);
}

// Which vectors of W rows, of `count` rows from first_row on, see any of the keys [key, key + n); `whole`: all of their
// rows see all of the keys.
struct SeenLanes {
  int64_t begin, end;
  bool whole;
};
template <int W>
ATTN_INLINE SeenLanes seen_lanes(const KeyRanges& keys, int64_t first_row, int64_t count, int64_t key, int64_t n) {
  const KeyRange rows = keys.rows(key, key + n - 1, first_row, first_row + count);
  if (rows.empty()) return {0, 0, false};
  SeenLanes s;
  s.begin = (rows.begin - first_row) / W;
  s.end = (rows.end - first_row + W - 1) / W;
  s.whole = keys.tile(first_row + s.begin * W, first_row + min_of(count, s.end * W) - 1, key, n).whole(n);
  return s;
}

// A mask value in log2 units. The lowest finite numbers stay finite: they are ordinary numbers, only -inf hides.
template <class C>
struct MaskValue {
  static constexpr C lowest = sizeof(C) == 4 ? C(-1.7e38) : C(-8e307);
  ATTN_INLINE Vec<C> operator()(Vec<C> x) const {
    const Vec<C> hidden = Vec<C>::set(-C(__builtin_inff()));
    return select(eq(x, hidden), hidden, max(Vec<C>::set(lowest), x * Vec<C>::set(C(log2_e))));
  }
  ATTN_INLINE C operator()(C x) const {
    if (x == -C(__builtin_inff())) return x;
    const C y = x * C(log2_e);
    return y < lowest ? lowest : y;
  }
};

// The same without the clamp, where no number needs it: then `low` stays at or above `lowest`.
template <class C>
struct PlainMaskValue {
  Vec<C> low = Vec<C>::zero();
  C low_one = 0;
  ATTN_INLINE Vec<C> operator()(Vec<C> x) {
    const Vec<C> y = x * Vec<C>::set(C(log2_e));
    low = min(low, y);
    return y;
  }
  ATTN_INLINE C operator()(C x) {
    const C y = x * C(log2_e);
    low_one = y < low_one ? y : low_one;
    return y;
  }
  bool exact() const { return low_one >= MaskValue<C>::lowest && !any(ge(Vec<C>::set(MaskValue<C>::lowest), low)); }
};

// True if no number is hidden or clamped; B then holds the block.
template <class T, class C>
ATTN_INLINE bool plain_mask_block(const T* m, int64_t row, int64_t col, int64_t rows, int64_t n, C* B, int64_t ldb) {
  constexpr int W = Vec<C>::width;
  if constexpr (sizeof(Compute<T>) == sizeof(C)) {
    if (col == 1 && row != 0) return pack_transposed_by(m, row, rows, n, PlainMaskValue<C>{}, B, W, W, ldb).exact();
  }
  return false;
}

template <class T, class C>
ATTN_INLINE void mask_block(const T* m, int64_t row, int64_t col, int64_t rows, int64_t n, C* B, int64_t ldb) {
  constexpr int W = Vec<C>::width;
  const MaskValue<C> f;
  if constexpr (sizeof(Compute<T>) == sizeof(C)) {
    if (col == 1 && row != 0) return pack_transposed(m, row, rows, n, f, B, W, W, ldb);
  }
  const int64_t lanes = round_up(rows, W);
  for (int64_t k = 0; k < n; k++) {
    if (row == 0) {  // one value for all rows: a padding mask
      const Vec<C> v = Vec<C>::set(f(C(load_one(m + k * col))));
      for (int64_t i = 0; i < lanes; i += W) store(B + k * ldb + i, v);
    } else {
      for (int64_t i = 0; i < lanes; i++) B[k * ldb + i] = i < rows ? f(C(load_one(m + i * row + k * col))) : C(0);
    }
  }
}

// added: as some_hidden, but not known to hide anything; summed: nothing is -inf but by the key ranges; alibi: there is
// no block, ALiBi is for the epilogue
enum class MaskBlock { all_visible, some_hidden, all_hidden, added, summed, alibi };
ATTN_INLINE bool has_block(MaskBlock b) {
  return b == MaskBlock::some_hidden || b == MaskBlock::added || b == MaskBlock::summed;
}
// whether the block's -inf hide keys
ATTN_INLINE bool may_hide(MaskBlock b) { return has_block(b) && b != MaskBlock::summed; }
ATTN_INLINE Hidden inside(MaskBlock b) {
  if (b == MaskBlock::summed) return Hidden::by_sum;
  if (b == MaskBlock::alibi) return Hidden::by_alibi;
  return has_block(b) ? Hidden::by_bias : Hidden::no;
}

template <Hidden H>
struct HiddenIs {
  static constexpr Hidden value = H;
};
// calls f(HiddenIs<h>)
template <class F>
ATTN_INLINE void with_hidden(Hidden h, F&& f) {
  switch (h) {
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

// Whether a boolean block shows or hides everything, told from its bytes.
ATTN_NOINLINE MaskBlock state_of(const mask_bool* m, int64_t row, int64_t col, int64_t rows, int64_t n) {
  uint8_t any_set = 0, all_set = 1;
  const auto* bytes = reinterpret_cast<const uint8_t*>(m);
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

// The same for a mask of blocks, told from its lists. Blocks begin at a multiple of the vector.
template <class C>
ATTN_NOINLINE MaskBlock load_blocks(const BlockRows& b, int64_t first, int64_t rows, int64_t k0, int64_t n, C* B,
                                    int64_t ldb) {
  constexpr int W = Vec<C>::width;
  bool any = false, all = true;
  each_block(b, first, rows, k0, n, [&](int64_t, int64_t, int64_t, int64_t, const uint8_t* elements, bool seen) {
    any |= seen;
    all &= seen && !elements;
  });
  if (!any || all) return any ? MaskBlock::all_visible : MaskBlock::all_hidden;
  each_block(b, first, rows, k0, n,
             [&](int64_t r, int64_t r_end, int64_t k, int64_t k_end, const uint8_t* elements, bool seen) {
               if (elements)
                 return mask_block(reinterpret_cast<const mask_bool*>(elements), b.size, 1, r_end - r, k_end - k,
                                   B + k * ldb + r, ldb);
               const Vec<C> value = seen ? Vec<C>::zero() : Vec<C>::set(-C(__builtin_inff()));
               for (; k < k_end; k++)
                 for (int64_t i = r; i < r_end; i += W) store(B + k * ldb + i, value);
             });
  return MaskBlock::some_hidden;
}

// Rows first .. first + rows - 1, keys k0 .. k0 + n - 1 of the mask tensor -> B[key][lane] in log2 units.
// A boolean block that shows everything or nothing is told apart and not written.
template <class T, class C>
ATTN_NOINLINE MaskBlock load_mask(const AttentionParams& p, const void* mask, int64_t first, int64_t rows, int64_t k0,
                                  int64_t n, C* B, int64_t ldb) {
  if (p.mask == MaskKind::blocks) return load_blocks(*static_cast<const BlockRows*>(mask), first, rows, k0, n, B, ldb);
  const int64_t at = first * p.mask_row + k0 * p.mask_col;
  if (p.mask == MaskKind::boolean) {
    const mask_bool* m = static_cast<const mask_bool*>(mask) + at;
    const MaskBlock state = state_of(m, p.mask_row, p.mask_col, rows, n);
    if (state == MaskBlock::some_hidden) mask_block(m, p.mask_row, p.mask_col, rows, n, B, ldb);
    return state;
  }
  const auto load = [&](const auto* m) {
    if (plain_mask_block(m, p.mask_row, p.mask_col, rows, n, B, ldb)) return MaskBlock::summed;
    mask_block(m, p.mask_row, p.mask_col, rows, n, B, ldb);
    return MaskBlock::added;
  };
  return p.mask_fp32 ? load(static_cast<const float*>(mask) + at) : load(static_cast<const T*>(mask) + at);
}

// The same rows and keys of the mask tensor, to be looked up; no steps where they are few.
template <class T>
ATTN_INLINE void look_up_mask(const AttentionParams& p, const void* mask, int64_t first, int64_t rows, int64_t k0,
                              int64_t n, Ahead& ahead) {
  if (p.mask == MaskKind::none || p.mask == MaskKind::blocks || p.mask_row == 0 || p.mask_col != 1) return;
  const int64_t at = first * p.mask_row + k0;
  if (p.mask == MaskKind::boolean)
    ahead.add(static_cast<const mask_bool*>(mask) + at, p.mask_row, n);
  else if (p.mask_fp32)
    ahead.add(static_cast<const float*>(mask) + at, p.mask_row, n);
  else
    ahead.add(static_cast<const T*>(mask) + at, p.mask_row, n);
  ahead.start(rows);
}

// -inf into B where the key ranges hide
template <class C>
ATTN_NOINLINE void hide_by_range(const KeyRanges& keys, int64_t first, int64_t rows, int64_t k0, int64_t n, C* B,
                                 int64_t ldb) {
  constexpr int W = Vec<C>::width;
  for (int64_t k = 0; k < n; k++) {
    const LaneRange<C> range = lane_range<C>(keys, first, k0 + k);
    for (int64_t i = 0; i < rows; i += W) {
      const auto visible = range.visible(Vec<C>::iota() + Vec<C>::set(C(i)));
      store(B + k * ldb + i, select(visible, load(B + k * ldb + i), Vec<C>::set(-C(__builtin_inff()))));
    }
  }
}

// Adds the bias of ALiBi, -slope * |first + offset + lane - key|, to B (`fresh`: B holds nothing yet). Lanes past the
// last row get 0, so that nothing overflows there.
template <class C>
ATTN_NOINLINE void add_alibi(const KeyRanges& keys, double slope, int64_t first, int64_t rows, int64_t k0, int64_t n,
                             bool fresh, C* B, int64_t ldb) {
  constexpr int W = Vec<C>::width;
  const Vec<C> factor = Vec<C>::set(C(-slope * log2_e)), last = Vec<C>::set(C(rows - 1)), zero = Vec<C>::zero();
  for (int64_t k = 0; k < n; k++) {
    const Vec<C> shift = Vec<C>::set(C(first + keys.offset - k0 - k));
    for (int64_t i = 0; i < rows; i += W) {
      const Vec<C> lane = Vec<C>::iota() + Vec<C>::set(C(i)), distance = lane + shift;
      const Vec<C> bias = select(ge(last, lane), factor * max(distance, zero - distance), zero);
      store(B + k * ldb + i, fresh ? bias : load(B + k * ldb + i) + bias);
    }
  }
}

// ALiBi in an epilogue: -slope * |distance| for keys against lanes, in log2 units.
template <class C>
struct Alibi {
  Vec<C> factor;
  C shift;  // position of lane 0 less the block's first key
  bool on;  // in the epilogue
  ATTN_INLINE Vec<C> distance(Vec<C> lane, int64_t lane0, int64_t k) const {  // signed; one less for the next key
    return lane + Vec<C>::set(shift + C(lane0 - k));
  }
  ATTN_INLINE Vec<C> add(Vec<C> x, Vec<C> distance) const {
    return fma(factor, max(distance, Vec<C>::zero() - distance), x);
  }
};
template <class C>
ATTN_INLINE Alibi<C> alibi_of(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t k0,
                              MaskBlock masked) {
  return {Vec<C>::set(C(-h.slope * log2_e)), C(first + p.keys.offset - k0), masked == MaskBlock::alibi};
}

// The additive block of a tile: mask tensor, ALiBi and, unless nothing is hidden or added, the key ranges.
// B points at key k0 of the block; `seen` is relative to k0. `Epilogue`: the caller knows by_sum and by_alibi.
template <class T, bool Epilogue = false, class C>
ATTN_INLINE MaskBlock load_bias(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t rows,
                                int64_t k0, const TileKeys& seen, C* B, int64_t ldb) {
  MaskBlock masked = MaskBlock::all_visible;
  const int64_t n = seen.end - seen.begin;
  if (p.mask != MaskKind::none)
    masked = load_mask<T>(p, h.mask, first, rows, k0 + seen.begin, n, B + seen.begin * ldb, ldb);
  if (masked == MaskBlock::all_hidden) return masked;
  if (p.alibi) {
    const bool fresh = !has_block(masked);
    if (Epilogue && fresh) return MaskBlock::alibi;
    add_alibi(p.keys, h.slope, first, rows, k0 + seen.begin, n, fresh, B + seen.begin * ldb, ldb);
    if (fresh) masked = MaskBlock::summed;
  }
  if (has_block(masked)) {
    hide_by_range(p.keys, first, rows, k0 + seen.begin, seen.all_begin - seen.begin, B + seen.begin * ldb, ldb);
    hide_by_range(p.keys, first, rows, k0 + seen.all_end, seen.end - seen.all_end, B + seen.all_end * ldb, ldb);
  }
  return !Epilogue && masked == MaskBlock::summed ? MaskBlock::added : masked;
}

}  // namespace
}  // namespace attnjourney
