// Masks and ALiBi for few query rows: a block bias[key][R] that is added to the scores of R rows, -inf where hidden.
#pragma once
#include "cpu/kernels/common/mask_tile.h"
#include "decode/params.h"

namespace attnjourney {
namespace {

// Real: what scores are computed in.
template <class Real, int R>
struct DecodeBias {
  using V = Vec<Real>;
  static constexpr int width = V::width;

  // One row's mask and ALiBi, counted from the block's first key. mask null: none.
  template <class M>
  struct Row {
    const M* mask;
    Real slope, position;
    ATTN_INLINE Real at(int64_t k, int64_t col) const {
      const Real added = mask ? Real(load_one(mask + k * col)) : Real(0), distance = position - Real(k);
      return added - slope * (distance < Real(0) ? -distance : distance);
    }
    ATTN_INLINE V vector(int64_t k) const {
      const V added = mask ? load(mask + k) : V::zero();
      const V distance = V::set(position - Real(k)) - V::iota();
      return added - V::set(slope) * max(distance, V::zero() - distance);
    }
  };

  // Whether any of it is -inf.
  template <class M>
  static ATTN_NOINLINE bool fill(const Row<M>* rows, int64_t col, int64_t n, Real* bias) {
    V least = V::zero();
    Real least_one = 0;
    int64_t k = 0;
    if constexpr (sizeof(Compute<M>) == sizeof(Real)) {
      if (col == 1 || !rows->mask)
        for (; k + width <= n; k += width) ATTN_UNROLL for (int first = 0; first < R; first += width) {
            V square[width];  // fewer rows than lanes: they repeat, and what is stored past a key's R numbers is the
                              // next key's
            ATTN_UNROLL for (int i = 0; i < width; i++) {
              square[i] = i < R ? rows[first + i].vector(k) : square[i % R];
              if (i < R) least = min(square[i], least);
            }
            if constexpr (R == 1) {
              store(bias + k, square[0]);
            } else {
              transpose(square);
              ATTN_UNROLL for (int i = 0; i < width; i++) store(bias + (k + i) * R + first, square[i]);
            }
          }
    }
    for (; k < n; k++)
      for (int r = 0; r < R; r++) {
        const Real added = rows[r].at(k, col);
        least_one = added < least_one ? added : least_one;
        bias[k * R + r] = added;
      }
    const Real hidden = -Real(__builtin_inff());
    return least_one == hidden || any(eq(least, V::set(hidden)));
  }

  // Keys k0 .. k0 + n of the rows from `row` on, `count` of which count. all_visible: bias is not written.
  template <class M>
  static ATTN_NOINLINE MaskBlock of_mask(const DecodeParams& params, const DecodeRows& rows, int64_t row, int64_t count,
                                         int64_t k0, int64_t n, Real* bias) {
    Row<M> all[R];
    MaskBlock state = params.alibi ? MaskBlock::summed : MaskBlock::all_visible;
    bool some_seen = false;
    for (int r = 0; r < R; r++) {
      if (r >= count) {
        all[r] = all[0];
        continue;
      }
      const int64_t head = (row + r) / params.q_len, query = (row + r) % params.q_len;
      Row<M>& mine = all[r];
      mine.mask = params.mask == MaskKind::none ? nullptr
                                                : static_cast<const M*>(rows.mask) + head * params.mask_head +
                                                      query * params.mask_row + k0 * params.mask_col;
      mine.slope = params.alibi ? Real(rows.slopes[head] * score_unit(params).scores) : Real(0);
      mine.position = Real(query + params.keys.offset - k0);
      if (r && mine.mask == all[r - 1].mask) continue;
      MaskBlock of_row = mine.mask ? MaskBlock::some_hidden : MaskBlock::all_visible;
      if constexpr (sizeof(M) == 1)
        if (mine.mask) of_row = state_of(mine.mask, 0, params.mask_col, 1, n);
      some_seen |= of_row != MaskBlock::all_hidden;
      if (of_row != MaskBlock::all_visible) state = MaskBlock::some_hidden;
    }
    if (!some_seen) return MaskBlock::all_hidden;
    if (state == MaskBlock::all_visible) return state;
    return fill(all, params.mask_col, n, bias) ? MaskBlock::some_hidden : MaskBlock::summed;
  }

  // Where there is a mask or ALiBi. T: of the query.
  template <class T>
  static ATTN_INLINE MaskBlock block(const DecodeParams& params, const DecodeRows& rows, int64_t row, int64_t count,
                                     int64_t k0, int64_t n, Real* bias) {
    if (params.mask == MaskKind::boolean) return of_mask<mask_bool>(params, rows, row, count, k0, n, bias);
    if (params.mask_fp32) return of_mask<float>(params, rows, row, count, k0, n, bias);
    return of_mask<T>(params, rows, row, count, k0, n, bias);
  }
};

}  // namespace
}  // namespace attnjourney
