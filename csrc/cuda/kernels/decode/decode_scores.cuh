// Scores and results of decoding, for any type of number: C is what a kernel computes in.
#pragma once
#include "cuda/kernels/common/numbers.cuh"
#include "cuda/kernels/common/scores.cuh"
#include "decode_task.cuh"

namespace attnjourney {

// What a difference of scores is in log2 units.
template <class Real>
__device__ __forceinline__ Real score_exponent(const DecodeTask& task) {
  return natural_scores(task) ? Real(log2_e) : Real(1);
}

// Row `number` of those that read one key head: query row number % q_len of head number / q_len of the group.
template <class Real>
struct DecodeRow {
  int row;                    // of its head
  Real slope;                 // in the unit of scores
  const unsigned char* mask;  // of key 0
  __device__ __forceinline__ DecodeRow(const DecodeTask& task, int batch, int kv_head, int64_t origin, int number)
      : DecodeRow(task, batch, kv_head, origin, number, task.rows, task.q_len) {}
  __device__ __forceinline__ DecodeRow(const DecodeTask& task, int batch, int kv_head, int64_t origin, int number,
                                       int rows, int q_len)
      : row(0), slope(0), mask(nullptr) {
    if (number >= rows) return;
    const int head = kv_head * task.group + number / q_len;
    row = number % q_len;
    if (task.slopes)
      slope = static_cast<const Real*>(task.slopes)[batch * task.slopes_batch + head] *
              (natural_scores(task) ? Real(1) : Real(log2_e));
    if (task.mask_kind == MaskElement::none) return;
    const int64_t at = batch * task.mask_batch + head * task.mask_head + row * task.mask_row + origin * task.mask_col;
    mask = static_cast<const unsigned char*>(task.mask) + at * task.mask_bytes;
  }
};

// A score from q . k, -inf where the mask hides it; the row's own range of keys is not looked at.
template <class T, class Real = Compute<T>>
__device__ __forceinline__ Real decode_score(const DecodeTask& task, const DecodeRow<Real>& r, int offset, int key,
                                             Real product) {
  Real score = task.cap > 0 ? Real(task.cap) * ptx::tanh(product * Real(task.cap_factor))
                            : ptx::rounded_product(product, Real(task.score_scale));
  if (task.slopes) score -= r.slope * static_cast<Real>(abs(r.row + offset - key));
  if (task.mask_kind == MaskElement::none || !r.mask) return score;
  const int64_t at = key * task.mask_col;
  if (task.mask_kind == MaskElement::boolean) return r.mask[at] ? score : -Real(INFINITY);
  const Real bias = task.mask_kind == MaskElement::fp32 ? Real(reinterpret_cast<const float*>(r.mask)[at])
                                                        : Real(ptx::to_float(reinterpret_cast<const T*>(r.mask)[at]));
  return bias == -Real(INFINITY) ? bias : score + bias;
}

// A row's reference (in the unit of scores) and sum of weights against it; sum 0: it sees nothing.
template <class Real>
struct RowSum {
  Real top, sum;
};

// What brings a part with its own reference to `top`. exponent: score_exponent's
template <class Real>
__device__ __forceinline__ Real part_weight(Real own, Real top, Real exponent) {
  return ptx::exp2((own - (top == -Real(INFINITY) ? Real(0) : top)) * exponent);
}

// The factor that ends an output, and lse, with the sink of the row's head.
template <class Real>
__device__ __forceinline__ Real end_row(const DecodeTask& task, int batch, int head, RowSum<Real> r, Real& lse) {
  Real inverse = r.sum == Real(0) ? Real(0) : Real(1) / r.sum;
  const double top = double(r.top) * (natural_scores(task) ? 1 : ln_2);
  lse = r.sum == Real(0) ? -Real(INFINITY) : Real(top + ::log(double(r.sum)));
  if (!task.sinks) return inverse;
  const double sink = static_cast<const Real*>(task.sinks)[batch * task.sinks_batch + head];
  if (sink == -double(INFINITY)) return inverse;
  const double above = natural_scores(task) ? (sink - double(r.top)) * log2_e : sink * log2_e - double(r.top);
  if (r.sum == Real(0)) {
    lse = Real(sink);
  } else if (above < 60) {
    const double whole = double(r.sum) + ::exp2(above);
    inverse = Real(1 / whole);
    lse = Real(top + ::log(whole));
  } else {  // larger by far: it is the reference
    const double weight = ::exp2(-above), whole = 1 + double(r.sum) * weight;
    inverse = Real(weight / whole);
    lse = Real(sink + ::log(whole));
  }
  return inverse;
}

}  // namespace attnjourney
