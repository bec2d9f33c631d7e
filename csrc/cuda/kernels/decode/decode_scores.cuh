// Scores and results of decoding, for any type of number: C is what a kernel computes in.
#pragma once
#include "cuda/kernels/common/numbers.cuh"
#include "cuda/kernels/common/scores.cuh"
#include "decode_task.cuh"

namespace attnjourney {

// Row `number` of those that read one key head: query row number % q_len of head number / q_len of the group.
template <class C>
struct DecodeRow {
  int row;                    // of its head
  C slope;                    // in log2 units
  const unsigned char* mask;  // of key 0
  __device__ __forceinline__ DecodeRow(const DecodeTask& task, int batch, int kv_head, int64_t origin, int number)
      : row(0), slope(0), mask(nullptr) {
    if (number >= task.rows) return;
    const int head = kv_head * task.group + number / task.q_len;
    row = number % task.q_len;
    if (task.slopes)
      slope = static_cast<const C*>(task.slopes)[batch * task.slopes_batch + head] * C(1.4426950408889634);
    if (task.mask_kind == MaskElement::none) return;
    const int64_t at = batch * task.mask_batch + head * task.mask_head + row * task.mask_row + origin * task.mask_col;
    mask = static_cast<const unsigned char*>(task.mask) + at * task.mask_bytes;
  }
};

// A score in log2 units from q . k, -inf where the mask hides it; the row's own range of keys is not looked at.
template <class T, class C = Compute<T>>
__device__ __forceinline__ C decode_score(const DecodeTask& task, const DecodeRow<C>& r, int offset, int key,
                                          C product) {
  constexpr double kLog2 = 1.4426950408889634;
  C x = task.softcap > 0 ? C(task.softcap * kLog2) * ptx::tanh(product * C(task.scale / task.softcap))
                         : product * C(task.scale * kLog2);
  if (task.slopes) x -= r.slope * static_cast<C>(abs(r.row + offset - key));
  if (task.mask_kind == MaskElement::none || !r.mask) return x;
  const int64_t at = key * task.mask_col;
  if (task.mask_kind == MaskElement::boolean) return r.mask[at] ? x : -C(INFINITY);
  const C bias = task.mask_kind == MaskElement::fp32 ? C(reinterpret_cast<const float*>(r.mask)[at])
                                                     : C(ptx::to_float(reinterpret_cast<const T*>(r.mask)[at]));
  if (bias == -C(INFINITY)) return bias;
  constexpr C kLeast = sizeof(C) == 8 ? C(-8.5e307) : C(kLowest);
  const C scaled = bias * C(kLog2);
  return x + (scaled < kLeast ? kLeast : scaled);
}

// A row's reference (log2 units) and sum of weights against it; sum 0: it sees nothing.
template <class C>
struct RowSum {
  C top, sum;
};

// What brings a part with its own reference to `top`.
template <class C>
__device__ __forceinline__ C part_weight(C own, C top) {
  return ptx::exp2(own - (top == -C(INFINITY) ? C(0) : top));
}

// The factor that ends an output, and lse, with the sink of the row's head.
template <class C>
__device__ __forceinline__ C end_row(const DecodeTask& task, int batch, int head, RowSum<C> r, C& lse) {
  constexpr double kLog2 = 1.4426950408889634, kLn2 = 0.6931471805599453;
  C inverse = r.sum == C(0) ? C(0) : C(1) / r.sum;
  lse = r.sum == C(0) ? -C(INFINITY) : C(double(r.top) * kLn2 + ::log(double(r.sum)));
  if (!task.sinks) return inverse;
  const double sink = static_cast<const C*>(task.sinks)[batch * task.sinks_batch + head];
  if (sink == -double(INFINITY)) return inverse;
  const double above = sink * kLog2 - double(r.top);
  if (r.sum == C(0)) {
    lse = C(sink);
  } else if (above < 60) {
    const double whole = double(r.sum) + ::exp2(above);
    inverse = C(1 / whole);
    lse = C(double(r.top) * kLn2 + ::log(whole));
  } else {  // larger by far: it is the reference
    const double weight = ::exp2(-above), whole = 1 + double(r.sum) * weight;
    inverse = C(weight / whole);
    lse = C(sink + ::log(whole));
  }
  return inverse;
}

}  // namespace attnjourney
