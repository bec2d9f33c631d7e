// Masks on a tile of S^T: keys down, lanes over queries. Key ranges come from csrc/mask.h; mask tensors are turned into
// an additive block, -inf where hidden, so that a tile knows three cases only: Hidden::no, by_range, by_bias.
#pragma once
#include "../../attention_params.h"
#include "pack.h"

namespace attnjourney {
namespace {

enum class Hidden { no, by_range, by_bias };

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
  constexpr int64_t far = 1 << 20;
  if (key >= keys.key_length) return {C(far), C(-far)};
  if (key < keys.prefix) return {C(-far), C(far)};
  const int64_t p = key - keys.offset - first_row;
  return {C(max_of(-far, min_of(far, p - keys.right))), C(max_of(-far, min_of(far, p + keys.left)))};
}

// What rows [first, last] see of the keys [k0, k0 + n), relative to k0: [begin, end) holds all any row sees (and, where
// prefix and window share the block, what lies between them), [all_begin, all_end) is seen whole by every row.
struct TileKeys {
  int64_t begin, all_begin, all_end, end;
  bool empty() const { return begin >= end; }
};
ATTN_INLINE TileKeys tile_keys(const KeyRanges& keys, int64_t first, int64_t last, int64_t k0, int64_t n) {
  KeyRange any = keys.any(first, last), all = keys.all(first, last);
  const int64_t k1 = k0 + n, prefix = min_of(keys.prefix, keys.key_length);
  if (prefix > k0) {
    const bool window = max_of(any.begin, k0) < min_of(any.end, k1);
    any = {k0, window ? max_of(any.end, prefix) : prefix};
    all = {k0, all.empty() || all.begin > prefix ? prefix : max_of(all.end, prefix)};
  }
  TileKeys t;
  t.begin = max_of(any.begin, k0) - k0;
  t.end = min_of(any.end, k1) - k0;
  t.all_begin = max_of(all.begin, k0) - k0;
  t.all_end = min_of(all.end, k1) - k0;
  if (t.begin >= t.end) t.begin = t.end = 0;
  if (t.all_begin >= t.all_end) t.all_begin = t.all_end = t.end;
  return t;
}

// Which vectors of W rows, of `count` rows from first_row on, see any of the keys [key, key + n); `whole`: all of their
// rows see all of the keys.
struct SeenLanes {
  int64_t begin, end;
  bool whole;
};
template <int W>
ATTN_INLINE SeenLanes seen_lanes(const KeyRanges& keys, int64_t first_row, int64_t count, int64_t key, int64_t n) {
  const KeyRange rows = keys.rows(key, key + n - 1, first_row + count);
  const int64_t from = max_of(0, rows.begin - first_row), to = min_of(count, rows.end - first_row);
  if (from >= to) return {0, 0, false};
  SeenLanes s;
  s.begin = from / W;
  s.end = (to + W - 1) / W;
  const TileKeys seen = tile_keys(keys, first_row + s.begin * W, first_row + min_of(count, s.end * W) - 1, key, n);
  s.whole = seen.all_begin == 0 && seen.all_end == n;
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

enum class MaskBlock { all_visible, some_hidden, all_hidden, added };

// Rows first .. first + rows - 1, keys k0 .. k0 + n - 1 of the mask tensor -> B[key][lane] in log2 units.
// A boolean block that shows everything or nothing is told apart.
template <class T, class C>
ATTN_NOINLINE MaskBlock load_mask(const AttentionParams& p, const void* mask, int64_t first, int64_t rows, int64_t k0,
                                  int64_t n, C* B, int64_t ldb) {
  constexpr int W = Vec<C>::width;
  const int64_t at = first * p.mask_row + k0 * p.mask_col;
  if (p.mask == MaskKind::boolean)
    mask_block(static_cast<const mask_bool*>(mask) + at, p.mask_row, p.mask_col, rows, n, B, ldb);
  else if (p.mask_fp32)
    mask_block(static_cast<const float*>(mask) + at, p.mask_row, p.mask_col, rows, n, B, ldb);
  else
    mask_block(static_cast<const T*>(mask) + at, p.mask_row, p.mask_col, rows, n, B, ldb);
  if (p.mask == MaskKind::floating) return MaskBlock::added;
  Vec<C> low = Vec<C>::zero(), high = Vec<C>::set(-C(__builtin_inff()));
  for (int64_t k = 0; k < n; k++) {
    int64_t i = 0;
    for (; i + W <= rows; i += W) {
      const Vec<C> b = load(B + k * ldb + i);
      low = min(low, b);
      high = max(high, b);
    }
    for (; i < rows; i++) {
      low = min(low, Vec<C>::set(B[k * ldb + i]));
      high = max(high, Vec<C>::set(B[k * ldb + i]));
    }
  }
  if (!any(ge(high, Vec<C>::zero()))) return MaskBlock::all_hidden;
  return any(eq(low, Vec<C>::set(-C(__builtin_inff())))) ? MaskBlock::some_hidden : MaskBlock::all_visible;
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

// The additive block of a tile: mask tensor, ALiBi and, unless nothing is hidden or added, the key ranges.
// B points at key k0 of the block; `seen` is relative to k0.
template <class T, class C>
ATTN_INLINE MaskBlock load_bias(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t rows,
                                int64_t k0, const TileKeys& seen, C* B, int64_t ldb) {
  MaskBlock masked = MaskBlock::all_visible;
  const int64_t n = seen.end - seen.begin;
  if (p.mask != MaskKind::none)
    masked = load_mask<T>(p, h.mask, first, rows, k0 + seen.begin, n, B + seen.begin * ldb, ldb);
  if (masked == MaskBlock::all_hidden) return masked;
  if (p.alibi) {
    add_alibi(p.keys, h.slope, first, rows, k0 + seen.begin, n, p.mask == MaskKind::none, B + seen.begin * ldb, ldb);
    masked = MaskBlock::added;
  }
  if (masked != MaskBlock::all_visible) {
    hide_by_range(p.keys, first, rows, k0 + seen.begin, seen.all_begin - seen.begin, B + seen.begin * ldb, ldb);
    hide_by_range(p.keys, first, rows, k0 + seen.all_end, seen.end - seen.all_end, B + seen.all_end * ldb, ldb);
  }
  return masked;
}

}  // namespace
}  // namespace attnjourney
