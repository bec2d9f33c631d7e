// What the kernels of attention's jvp and of the backward's jvp share: the tangent of a score.
#pragma once
#include "stages.h"

namespace attnjourney {
namespace {

// Rows first .. first + rows - 1, keys k0 .. k0 + n - 1 of the additive tangents -> B[key][lane]: mask - slope *
// distance
template <class T, class C>
ATTN_NOINLINE void load_tangent_bias(const AttentionParams& p, const HeadTangents& h, int64_t first, int64_t rows,
                                     int64_t k0, int64_t n, C* B, int64_t ldb) {
  constexpr int W = Vec<C>::width;
  const int64_t lanes = round_up(rows, W);
  const auto block = [&]<class M>(const M* m) {
    m += first * h.mask_row + k0 * h.mask_col;
    if constexpr (sizeof(Compute<M>) == sizeof(C))
      if (h.mask_col == 1 && h.mask_row != 0)
        return pack_transposed(m, h.mask_row, rows, n, Times<C>{C(1)}, B, W, W, ldb);
    for (int64_t k = 0; k < n; k++)
      for (int64_t i = 0; i < lanes; i++)
        B[k * ldb + i] = i < rows ? C(load_one(m + i * h.mask_row + k * h.mask_col)) : C(0);
  };
  if (!h.mask)
    for (int64_t k = 0; k < n; k++) memset(B + k * ldb, 0, size_t(lanes) * sizeof(C));
  else if (p.mask_fp32)
    block(static_cast<const float*>(h.mask));
  else
    block(static_cast<const T*>(h.mask));
  if (h.slope == 0) return;
  const Vec<C> slope = Vec<C>::set(C(h.slope)), zero = Vec<C>::zero();
  for (int64_t k = 0; k < n; k++) {
    const Vec<C> shift = Vec<C>::set(C(first + p.keys.offset - k0 - k));
    for (int64_t i = 0; i < lanes; i += W) {
      const Vec<C> distance = Vec<C>::iota() + Vec<C>::set(C(i)) + shift;
      store(B + k * ldb + i, load(B + k * ldb + i) - slope * max(distance, zero - distance));
    }
  }
}

// What sums over a row's keys become. Its weights, with that of the sink, sum to 1 but for the rounding of lse: that is
// taken out here, for what follows subtracts d(lse) from every A.
template <class C>
struct RowMean {
  C inverse = 1, sink = 0;  // 1 / sum of the weights; the sink's term

  ATTN_INLINE RowMean(const HeadPointers& h, const HeadTangents& d, int64_t row, C total) {
    if (h.sink != -__builtin_inf()) {
      const C weight = C(__builtin_exp2((h.sink - double(static_cast<const C*>(h.lse)[row])) * log2_e));
      total += weight;
      sink = weight * C(d.sink);
    }
    if (d.scores() && total > C(0)) inverse = C(1) / total;
  }
  ATTN_INLINE C of(C sum) const { return (sum + sink) * inverse; }
};

// x: products with packed queries -> the tangents of the scaled scores, before any softcap
template <class C>
ATTN_INLINE C tangent_factor(const AttentionParams& p) {
  return C(p.softcap > 0 ? p.softcap / (2 * log2_e) : 1 / log2_e);
}

}  // namespace
}  // namespace attnjourney
