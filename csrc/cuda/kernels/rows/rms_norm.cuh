// Root mean square normalisation (csrc/layers/rms_norm.h): a warp to each row; the weight's gradient in two passes
// whose sums have one order.
#pragma once
#include "cuda/kernels/common/numbers.cuh"

namespace attnjourney {

struct RmsTask {
  const void *x, *weight, *grad_y;  // [rows, width], [width], [rows, width]
  void *out, *rstd;                 // y or grad_x [rows, width]; [rows], read where it is given
  void *parts, *grad_weight;        // [spans, width] in the type of the arithmetic; [width]
  int64_t rows, x_row, out_row;     // row strides; grad_y and y are dense
  int width, span, spans;           // rows that one part sums up
  double eps, inverse_width;
  bool given;  // forward: rstd is there already
};

constexpr int kRmsThreads = 128;
inline int64_t rms_row_blocks(const RmsTask& task) { return (task.rows + kRmsThreads / 32 - 1) / (kRmsThreads / 32); }
inline int rms_column_blocks(const RmsTask& task) { return (task.width + kRmsThreads - 1) / kRmsThreads; }

// grid: rms_row_blocks. V > 1: rows and width in multiples of V numbers.
template <class T, int V>
__global__ void __launch_bounds__(kRmsThreads) rms_forward(const RmsTask task) {
  using Real = Compute<T>;
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t(blockIdx.x) * (kRmsThreads / 32) + threadIdx.x / 32;
  if (row >= task.rows) return;
  const T *x = static_cast<const T*>(task.x) + row * task.x_row, *weight = static_cast<const T*>(task.weight);
  T* y = static_cast<T*>(task.out) + row * task.out_row;
  Real* rstd = static_cast<Real*>(task.rstd) + row;
  Real factor;
  if (task.given) {
    factor = *rstd;
  } else {
    Real sum = 0;
    for (int j = lane * V; j < task.width; j += 32 * V) {
      Real values[V];
      load_numbers<T, V>(values, x + j);
#pragma unroll
      for (int i = 0; i < V; i++) sum += values[i] * values[i];
    }
    factor = 1 / std::sqrt(warp_sum(sum) * static_cast<Real>(task.inverse_width) + static_cast<Real>(task.eps));
    if (lane == 0) *rstd = factor;
  }
  for (int j = lane * V; j < task.width; j += 32 * V) {
    Real values[V], weights[V];
    load_numbers<T, V>(values, x + j);
    load_numbers<T, V>(weights, weight + j);
#pragma unroll
    for (int i = 0; i < V; i++) values[i] = values[i] * factor * weights[i];
    store_numbers<T, V>(y + j, values);
  }
}

// With g = grad_y * weight: grad_x = rstd * (g - x * rstd^2 * mean(g * x)). grid: rms_row_blocks
template <class T, int V>
__global__ void __launch_bounds__(kRmsThreads, 6) rms_grad_x(const RmsTask task) {
  using Real = Compute<T>;
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t(blockIdx.x) * (kRmsThreads / 32) + threadIdx.x / 32;
  if (row >= task.rows) return;
  const T *x = static_cast<const T*>(task.x) + row * task.x_row, *weight = static_cast<const T*>(task.weight);
  const T* grad_y = static_cast<const T*>(task.grad_y) + row * task.width;
  T* grad_x = static_cast<T*>(task.out) + row * task.out_row;
  const Real rstd = static_cast<const Real*>(task.rstd)[row];
  Real values[V], grads[V], weights[V], dot = 0;
  const auto read = [&](int j) {
    load_numbers<T, V>(values, x + j);
    load_numbers<T, V>(grads, grad_y + j);
    load_numbers<T, V>(weights, weight + j);
#pragma unroll
    for (int i = 0; i < V; i++) grads[i] *= weights[i];
  };
  for (int j = lane * V; j < task.width; j += 32 * V) {
    read(j);
#pragma unroll
    for (int i = 0; i < V; i++) dot += grads[i] * values[i];
  }
  const Real mean = rstd * rstd * warp_sum(dot) * static_cast<Real>(task.inverse_width);
  for (int j = lane * V; j < task.width; j += 32 * V) {
    read(j);
#pragma unroll
    for (int i = 0; i < V; i++) values[i] = rstd * (grads[i] - values[i] * mean);
    store_numbers<T, V>(grad_x + j, values);
  }
}

// parts[s] = sum over the rows of span s of grad_y * x * rstd. grid: spans * rms_column_blocks
template <class T>
__global__ void __launch_bounds__(kRmsThreads) rms_grad_weight_parts(const RmsTask task) {
  using Real = Compute<T>;
  const int columns = (task.width + kRmsThreads - 1) / kRmsThreads;
  const int span = blockIdx.x / columns, j = blockIdx.x % columns * kRmsThreads + threadIdx.x;
  if (j >= task.width) return;
  const int64_t begin = int64_t(span) * task.span, end = min(begin + task.span, task.rows);
  Real sum = 0;
  for (int64_t row = begin; row < end; row++)
    sum += ptx::to_float(static_cast<const T*>(task.grad_y)[row * task.width + j]) *
           ptx::to_float(static_cast<const T*>(task.x)[row * task.x_row + j]) *
           static_cast<const Real*>(task.rstd)[row];
  static_cast<Real*>(task.parts)[int64_t(span) * task.width + j] = sum;
}

// grid: rms_column_blocks
template <class T>
__global__ void __launch_bounds__(kRmsThreads) rms_grad_weight(const RmsTask task) {
  const int j = blockIdx.x * kRmsThreads + threadIdx.x;
  if (j >= task.width) return;
  Compute<T> sum = 0;
  for (int s = 0; s < task.spans; s++) sum += static_cast<const Compute<T>*>(task.parts)[int64_t(s) * task.width + j];
  store_one(static_cast<T*>(task.grad_weight) + j, sum);
}

}  // namespace attnjourney
