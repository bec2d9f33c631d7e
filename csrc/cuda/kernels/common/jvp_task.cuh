// The parameters of a kernel for the derivative of attention in a direction, and what it does to a tile of scores and
// to the sums of a row. One pass over the keys, since the forward has left the reference of each row:
//
//   A = d(score) = scale * f' * (dQ K^T + Q dK^T) + d(mask) - d(slope) * distance,  f: the score modifier
//   d(lse) = mu = sum P A (+ P_sink d(sink)),   d(out) = (P A) V + P dV - mu out
#pragma once
#include "forward_task.cuh"
#include "scores.cuh"

namespace attnjourney {

// Directions, null for zero: like what they belong to, with strides of their own; sinks and slopes [batch, q_heads].
template <class Real>
struct DirectionsOf {
  const void *query_tangent, *key_tangent, *value_tangent, *mask_tangent;
  Strides query_tangent_strides, key_tangent_strides, value_tangent_strides;
  int64_t mask_tangent_batch[kMaskDims], mask_tangent_head, mask_tangent_row, mask_tangent_col;
  const Real *sinks_tangent, *slopes_tangent;

  // does any score change?
  __device__ __forceinline__ bool moves() const {
    return query_tangent || key_tangent || mask_tangent || slopes_tangent;
  }
};

// `out` and `stats` are read, `lse` is not used.
template <class Real>
struct JvpTaskOf : ForwardTaskOf<Real>, DirectionsOf<Real> {
  Real scale;
  void* out_tangent;  // like out
  Strides out_tangent_strides;
  Real* lse_tangent;  // like lse
};
using JvpTask = JvpTaskOf<float>;

// One head's part of the directions.
template <class Real>
struct HeadChange {
  const unsigned char* mask;
  Real slope;
  template <class Task>
  __device__ __forceinline__ HeadChange(const Task& p, int batch, int head) : mask(nullptr), slope(0) {
    if (p.slopes_tangent) slope = p.slopes_tangent[batch * p.q_heads + head];
    if (!p.mask_tangent) return;
    const int64_t at = head * p.mask_tangent_head + batch_offset(p.scores, p.mask_tangent_batch, batch);
    mask = static_cast<const unsigned char*>(p.mask_tangent) + at * p.scores.mask_bytes;
  }
  template <class T, class Task>
  __device__ __forceinline__ Real of_mask(const Task& p, int row, int key) const {
    const int64_t at = row * p.mask_tangent_row + key * p.mask_tangent_col;
    return p.scores.mask_kind == MaskElement::fp32 ? reinterpret_cast<const float*>(mask)[at]
                                                   : ptx::to_float(reinterpret_cast<const T*>(mask)[at]);
  }
};

// A sum of many terms in float and double, a tile's at a time: what rounding takes is kept next to it (Knuth's sum of
// two). For 16-bit results the sum alone is enough.
template <class T, class Real>
struct TermSum {
  Real sum = 0, low = 0;
  __device__ __forceinline__ void add(Real x) {
    const Real next = sum + x;
    if constexpr (sizeof(T) > 2) {
      const Real part = next - sum;
      low += (sum - (next - part)) + (x - part);
    }
    sum = next;
  }
  // of the four threads of a row
  __device__ __forceinline__ Real of_row() const {
    Real x = sum + low;
    x += ptx::shfl_xor(x, 1);
    return x + ptx::shfl_xor(x, 2);
  }
};

// A row of a thread. Weights are factor * 2^(score - reference) and at most 1; what their sum lacks of 1 is divided by
// at the end. In 16 bits they do not go below 2^-8 of the largest, which keeps them from underflow in long rows.
//
// Pivots, in float and double alone: a row with one key that has all but its weight is gone over again with that key's
// A as a pivot: (A - pivot) in place of A is 0 there, where mu out would have to cancel (P A) V.
template <class T, class Real>
struct TangentRow {
  static constexpr bool kPivots = sizeof(T) > 2;
  Real reference = 0, factor = 0;
  Real pivot = 0, most = 0, of_most = 0;  // most: the largest weight, of_most: its A
  TermSum<T, Real> mu, rounded, total;    // sums of P (A - pivot), of what of it meets V, and of P

  __device__ __forceinline__ void begin(const RowStats<Real>& stats) {
    reference = stats.reference;
    factor = kPivots ? stats.inverse : fmax(stats.inverse, Real(1) / 256);
  }
  // Takes a pivot where it needs one, and tells whether it does. All threads of the warp.
  __device__ __forceinline__ bool take_pivot() {
#pragma unroll
    for (int m = 1; m < 4; m *= 2) {
      const Real other = ptx::shfl_xor(most, m), of_other = ptx::shfl_xor(of_most, m);
      const bool higher = other > most || (other == most && (threadIdx.x & m));  // the same in both threads
      most = higher ? other : most, of_most = higher ? of_other : of_most;
    }
    const bool takes = most >= Real(0.999) && of_most - of_most == 0 && of_most != 0;
    pivot = takes ? of_most : 0;
    return takes;
  }
  __device__ __forceinline__ void clear_sums() { mu = rounded = total = {}; }
};

// Products to weights and their changes, for the products with dV and with V. s: q . k, a: dq . k + q . dk; row, key:
// of the thread's element 0.
template <class T, class F, class Real>
__device__ __forceinline__ void change_weights(Real (&s)[F::kCount / 4][4], Real (&a)[F::kCount / 4][4],
                                               const JvpTaskOf<Real>& p, const HeadScoresOf<Real>& scores,
                                               const HeadChange<Real>& change, int offset, int row, int key,
                                               uint32_t seen, TangentRow<T, Real> (&rows)[2]) {
  const uint32_t bits = p.scores.seed ? kept(p.scores, scores, row, key, threadIdx.x % 32, F{}) : ~0u;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    TangentRow<T, Real>& of = rows[h];
    const int first_row = ptx::opaque(row), first_key = ptx::opaque(key);  // known to both halves, they would spill
    Real mu = 0, rounded = 0, total = 0;
#pragma unroll
    for (int pair = h; pair < F::kCount / 2; pair += 2) {  // two keys side by side
      Real kept_weight[2], kept_change[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = 2 * pair + e, r = first_row + F::row(i), k = first_key + F::key(i);
        const WeightedScore<Real> x = weighted<T>(p.scores, scores, r, k, offset, seen >> i & 1, true, s[i / 4][i % 4],
                                                  p.score_scale, {of.reference, of.factor}, Real(0), Real(0));
        const bool counts = x.weight != 0;
        Real changed = a[i / 4][i % 4] * p.scale * x.slope;
        if (p.mask_tangent && counts) changed += change.template of_mask<T>(p, r, k);
        if (p.slopes_tangent) changed -= change.slope * distance<Real>(r, k, offset);
        if constexpr (TangentRow<T, Real>::kPivots)
          if (x.weight > of.most) of.most = x.weight, of.of_most = changed;
        changed = counts ? x.weight * (changed - of.pivot) : 0;
        mu += changed, total += x.weight;
        const bool keep = bits >> i & 1;
        kept_weight[e] = keep ? x.weight : 0, kept_change[e] = changed;
      }
      if constexpr (sizeof(T) == 2) {
        const float2 two = ptx::unpack2<T>(ptx::pack2<T>(kept_change[0], kept_change[1]));
        kept_change[0] = two.x, kept_change[1] = two.y;
      }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = 2 * pair + e;
        rounded += kept_change[e];
        s[i / 4][i % 4] = kept_weight[e];
        a[i / 4][i % 4] = bits >> i & 1 ? kept_change[e] : 0;
      }
    }
    of.mu.add(mu), of.rounded.add(rounded), of.total.add(total);
  }
}

// What a row's sums come to: d(out) = factor * sum - mean * out
template <class Real>
struct RowTangent {
  Real lse, factor, mean;
  // sink: of the head, -inf without one. All threads of the warp.
  template <class T>
  __device__ __forceinline__ RowTangent(const JvpTaskOf<Real>& p, const TangentRow<T, Real>& row, uint32_t head,
                                        bool exists) {
    Real mu = row.mu.of_row(), rounded = row.rounded.of_row(), total = row.total.of_row();
    if (p.scores.sinks && exists && p.scores.sinks[head] != -INFINITY) {
      const Real score = sink_score(p.scores, p.scores.sinks[head]);
      const Real weight = ptx::exp2((score - row.reference) * p.scores.exponent) * row.factor;
      const Real changed = weight * ((p.sinks_tangent ? p.sinks_tangent[head] : 0) - row.pivot);
      total += weight, mu += changed, rounded += changed;
    }
    const Real inverse = total == 0 ? 0 : 1 / total;
    lse = total == 0 ? 0 : row.pivot + mu * inverse;
    factor = p.scores.seed ? inverse * p.scores.keep_scale : inverse;
    mean = rounded * inverse;
  }
};

// the row's number in lse
template <class Real>
__device__ __forceinline__ int64_t first_stat(const ForwardTaskOf<Real>& p, const ForwardTile& where, int q_begin) {
  return (p.cu_q ? int64_t(where.head) : int64_t(where.batch) * p.q_heads + where.head) * p.q_len + q_begin;
}

}  // namespace attnjourney
