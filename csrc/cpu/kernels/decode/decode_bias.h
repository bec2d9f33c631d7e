// Masks and ALiBi for few query rows: a block B[key][R] that is added to the scores of R rows, -inf where hidden.
#pragma once
#include "cpu/kernels/common/mask_tile.h"
#include "decode/params.h"

namespace attnjourney {
namespace {

// C: what scores are computed in. T: of the query.
template <class T, int R>
struct DecodeBias {
  using C = Compute<T>;
  using V = Vec<C>;
  static constexpr int W = V::width;

  // One row's mask and ALiBi, counted from the block's first key. mask null: none.
  template <class M>
  struct Row {
    const M* mask;
    C slope, position;
    ATTN_INLINE C at(int64_t k, int64_t col) const {
      const C x = mask ? MaskValue<C>{}(C(load_one(mask + k * col))) : C(0), d = position - C(k);
      return x - slope * (d < C(0) ? -d : d);
    }
    ATTN_INLINE V vector(int64_t k) const {
      const V x = mask ? MaskValue<C>{}(load(mask + k)) : V::zero();
      const V d = V::set(position - C(k)) - V::iota();
      return x - V::set(slope) * max(d, V::zero() - d);
    }
  };

  // Whether any of it is -inf.
  template <class M>
  static ATTN_NOINLINE bool fill(const Row<M>* rows, int64_t col, int64_t n, C* B) {
    V least = V::zero();
    C least_one = 0;
    int64_t k = 0;
    if constexpr (sizeof(Compute<M>) == sizeof(C)) {
      if (col == 1 || !rows->mask)
        for (; k + W <= n; k += W) ATTN_UNROLL for (int first = 0; first < R; first += W) {
            V x[W];  // fewer rows than lanes: they repeat, and what is stored past a key's R numbers is the next key's
            ATTN_UNROLL for (int i = 0; i < W; i++) {
              x[i] = i < R ? rows[first + i].vector(k) : x[i % R];
              if (i < R) least = min(x[i], least);
            }
            if constexpr (R == 1) {
              store(B + k, x[0]);
            } else {
              transpose(x);
              ATTN_UNROLL for (int i = 0; i < W; i++) store(B + (k + i) * R + first, x[i]);
            }
          }
    }
    for (; k < n; k++)
      for (int r = 0; r < R; r++) {
        const C x = rows[r].at(k, col);
        least_one = x < least_one ? x : least_one;
        B[k * R + r] = x;
      }
    const C hidden = -C(__builtin_inff());
    return least_one == hidden || any(eq(least, V::set(hidden)));
  }

  // Keys k0 .. k0 + n of the rows from `row` on, `count` of which count. all_visible: B is not written.
  template <class M>
  static ATTN_INLINE MaskBlock of_mask(const DecodeParams& p, const DecodeRows& rows, int64_t row, int64_t count,
                                       int64_t k0, int64_t n, C* B) {
    Row<M> all[R];
    MaskBlock state = p.alibi ? MaskBlock::summed : MaskBlock::all_visible;
    bool some_seen = false;
    for (int r = 0; r < R; r++) {
      if (r >= count) {
        all[r] = all[0];
        continue;
      }
      const int64_t h = (row + r) / p.q_len, t = (row + r) % p.q_len;
      Row<M>& x = all[r];
      x.mask = p.mask == MaskKind::none
                   ? nullptr
                   : static_cast<const M*>(rows.mask) + h * p.mask_head + t * p.mask_row + k0 * p.mask_col;
      x.slope = p.alibi ? C(rows.slopes[h] * log2_e) : C(0);
      x.position = C(t + p.keys.offset - k0);
      if (r && x.mask == all[r - 1].mask) continue;
      MaskBlock of_row = x.mask ? MaskBlock::some_hidden : MaskBlock::all_visible;
      if constexpr (sizeof(M) == 1)
        if (x.mask) of_row = state_of(x.mask, 0, p.mask_col, 1, n);
      some_seen |= of_row != MaskBlock::all_hidden;
      if (of_row != MaskBlock::all_visible) state = MaskBlock::some_hidden;
    }
    if (!some_seen) return MaskBlock::all_hidden;
    if (state == MaskBlock::all_visible) return state;
    return fill(all, p.mask_col, n, B) ? MaskBlock::some_hidden : MaskBlock::summed;
  }

  static ATTN_INLINE MaskBlock block(const DecodeParams& p, const DecodeRows& rows, int64_t row, int64_t count,
                                     int64_t k0, int64_t n, C* B) {
    if (p.mask == MaskKind::none && !p.alibi) return MaskBlock::all_visible;
    if (p.mask == MaskKind::boolean) return of_mask<mask_bool>(p, rows, row, count, k0, n, B);
    if (p.mask_fp32) return of_mask<float>(p, rows, row, count, k0, n, B);
    return of_mask<T>(p, rows, row, count, k0, n, B);
  }
};

}  // namespace
}  // namespace attnjourney
