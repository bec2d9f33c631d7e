// What the kernels of attention's jvp and of the backward's jvp share: the tangent of a score.
#pragma once
#include "stages.h"

namespace attnjourney {
namespace {

// Rows first .. first + rows - 1, keys k0 .. k0 + n - 1 of the additive tangents -> B[key][lane]: mask - slope *
// distance
template <class T, class Real>
ATTN_NOINLINE void load_tangent_bias(const AttentionParams& params, const HeadTangents& tangents, int64_t first,
                                     int64_t rows, int64_t k0, int64_t n, Real* B, int64_t ldb) {
  constexpr int width = Vec<Real>::width;
  const int64_t lanes = round_up(rows, width);
  const auto block = [&]<class M>(const M* m) {
    m += first * tangents.mask_row + k0 * tangents.mask_col;
    if constexpr (sizeof(Compute<M>) == sizeof(Real))
      if (tangents.mask_col == 1 && tangents.mask_row != 0)
        return pack_transposed(m, tangents.mask_row, rows, n, Times<Real>{Real(1)}, B, width, width, ldb);
    for (int64_t k = 0; k < n; k++)
      for (int64_t i = 0; i < lanes; i++)
        B[k * ldb + i] = i < rows ? Real(load_one(m + i * tangents.mask_row + k * tangents.mask_col)) : Real(0);
  };
  if (!tangents.mask)
    for (int64_t k = 0; k < n; k++) memset(B + k * ldb, 0, size_t(lanes) * sizeof(Real));
  else if (params.mask_fp32)
    block(static_cast<const float*>(tangents.mask));
  else
    block(static_cast<const T*>(tangents.mask));
  if (tangents.slope == 0) return;
  const Vec<Real> slope = Vec<Real>::set(Real(tangents.slope)), zero = Vec<Real>::zero();
  for (int64_t k = 0; k < n; k++) {
    const Vec<Real> shift = Vec<Real>::set(Real(first + params.keys.offset - k0 - k));
    for (int64_t i = 0; i < lanes; i += width) {
      const Vec<Real> distance = Vec<Real>::iota() + Vec<Real>::set(Real(i)) + shift;
      store(B + k * ldb + i, load(B + k * ldb + i) - slope * max(distance, zero - distance));
    }
  }
}

// What sums over a row's keys become. Its weights, with that of the sink, sum to 1 but for rounding: that is taken out
// here, for what follows subtracts d(lse) from every A.
template <class Real>
struct RowMean {
  Real inverse = 1, sink = 0;  // 1 / sum of the weights; the sink's term

  // pivot: what every A is taken against
  ATTN_INLINE RowMean(const AttentionParams& params, const HeadPointers& head, const HeadTangents& tangents,
                      int64_t row, Real total, Real pivot = 0) {
    if (head.sink != -__builtin_inf()) {
      const ScoreUnit unit = score_unit(params);
      const Real weight = Real(sink_weight(head.sink, row_stats<Real>(head, row, unit), unit));
      total += weight;
      sink = weight * (Real(tangents.sink) - pivot);
    }
    if (tangents.scores() && total > Real(0)) inverse = Real(1) / total;
  }
  ATTN_INLINE Real of(Real sum) const { return (sum + sink) * inverse; }
};

// d(out) of one row, from its sum over the keys: factor * sum - mu * out
template <class T, class Real>
ATTN_INLINE void write_tangent(const AttentionParams& params, const HeadPointers& head, const HeadTangents& tangents,
                               int64_t row, Real mu, Real inverse, const Real* sum) {
  constexpr int width = Vec<Real>::width;
  const Real factor = inverse * Real(params.dropout.keep_scale);
  const T* const out = static_cast<const T*>(head.out) + row * params.out_row;
  T* const to = static_cast<T*>(tangents.out) + row * tangents.out_row;
  int64_t d = 0;
  for (; d + width <= params.v_head_dim; d += width)
    store(to + d, fma(Vec<Real>::set(-mu), load(out + d), Vec<Real>::set(factor) * load(sum + d)));
  for (; d < params.v_head_dim; d++) store_one(to + d, fma(-mu, Real(load_one(out + d)), factor * sum[d]));
}

}  // namespace
}  // namespace attnjourney
