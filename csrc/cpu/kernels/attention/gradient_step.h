// From weights and their gradients to those of the scores, in the backward's tiles [key][tile].
#pragma once
#include "cpu/kernels/common/mask_tile.h"
#include "cpu/kernels/common/score_modifier.h"
#include "cpu/kernels/common/tile.h"

namespace attnjourney {
namespace {

// dS = P * (dP - delta), the end of the product dP = V dO^T
template <class Real, int64_t tile, bool Dropout, bool Guard>
struct GradientStep {
  static constexpr int width = Vec<Real>::width;
  static constexpr bool hides = false;
  const Real* minus_delta;  // [tile]
  Real *P, *dS;
  ATTN_INLINE void clear(int64_t at) const { store(dS + at, Vec<Real>::zero()); }
  template <Hidden, int M, int N>
  ATTN_INLINE void finish(Tile<Real, M, N>& x, int64_t lane0, int64_t, int64_t k) const {
    const int64_t at = k * tile + lane0;
    ATTN_UNROLL for (int j = 0; j < N; j++) {
      const Vec<Real> delta = load(minus_delta + lane0 + width * j);
      ATTN_UNROLL for (int r = 0; r < M; r++) {
        Vec<Real> w = load(P + at + r * tile + width * j), y = x.acc[r][j] + delta;
        if constexpr (Dropout) {  // a negative P marks a dropped weight
          const auto kept = ge(w, Vec<Real>::zero());
          y = select(kept, y, delta);
          const Vec<Real> zero = Vec<Real>::zero(), left = max(zero, w);
          w = max(w, zero - w);
          store(P + at + r * tile + width * j, left);
        }
        Vec<Real> s = w * y;
        if constexpr (Guard) s = select(eq(w, Vec<Real>::zero()), Vec<Real>::zero(), s);  // a hidden NaN stays hidden
        store(dS + at + r * tile + width * j, s);
      }
    }
  }
};

// dS by the modified scores -> dS by the scores; a hidden NaN stays hidden
template <int64_t tile, class Real>
ATTN_NOINLINE void through_modifier(Modifier<Real> modifier, int64_t vectors_used, const Real* states,
                                    const TileKeys& seen, Real* dS) {
  constexpr int width = Vec<Real>::width;
  const Vec<Real> zero = Vec<Real>::zero();
  for (int64_t k = seen.begin; k < seen.end; k++)
    for (int64_t i = 0; i < vectors_used; i++) {
      Real* x = dS + k * tile + i * width;
      const Vec<Real> s = load(x);
      store(x, select(eq(s, zero), zero, s * modifier.slope(load(states + k * tile + i * width))));
    }
}

}  // namespace
}  // namespace attnjourney
