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
inline int64_t rms_row_blocks(const RmsTask& p) { return (p.rows + kRmsThreads / 32 - 1) / (kRmsThreads / 32); }
inline int rms_column_blocks(const RmsTask& p) { return (p.width + kRmsThreads - 1) / kRmsThreads; }

// grid: rms_row_blocks. V > 1: rows and width in multiples of V numbers.
template <class T, int V>
__global__ void __launch_bounds__(kRmsThreads) rms_forward(const RmsTask p) {
  using C = Compute<T>;
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t(blockIdx.x) * (kRmsThreads / 32) + threadIdx.x / 32;
  if (row >= p.rows) return;
  const T *x = static_cast<const T*>(p.x) + row * p.x_row, *weight = static_cast<const T*>(p.weight);
  T* y = static_cast<T*>(p.out) + row * p.out_row;
  C* rstd = static_cast<C*>(p.rstd) + row;
  C factor;
  if (p.given) {
    factor = *rstd;
  } else {
    C sum = 0;
    for (int j = lane * V; j < p.width; j += 32 * V) {
      C v[V];
      load_numbers<T, V>(v, x + j);
#pragma unroll
      for (int i = 0; i < V; i++) sum += v[i] * v[i];
    }
    factor = 1 / std::sqrt(warp_sum(sum) * static_cast<C>(p.inverse_width) + static_cast<C>(p.eps));
    if (lane == 0) *rstd = factor;
  }
  for (int j = lane * V; j < p.width; j += 32 * V) {
    C v[V], w[V];
    load_numbers<T, V>(v, x + j);
    load_numbers<T, V>(w, weight + j);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = v[i] * factor * w[i];
    store_numbers<T, V>(y + j, v);
  }
}

// With g = grad_y * weight: grad_x = rstd * (g - x * rstd^2 * mean(g * x)). grid: rms_row_blocks
template <class T, int V>
__global__ void __launch_bounds__(kRmsThreads, 6) rms_grad_x(const RmsTask p) {
  using C = Compute<T>;
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t(blockIdx.x) * (kRmsThreads / 32) + threadIdx.x / 32;
  if (row >= p.rows) return;
  const T *x = static_cast<const T*>(p.x) + row * p.x_row, *weight = static_cast<const T*>(p.weight);
  const T* grad_y = static_cast<const T*>(p.grad_y) + row * p.width;
  T* grad_x = static_cast<T*>(p.out) + row * p.out_row;
  const C rstd = static_cast<const C*>(p.rstd)[row];
  C v[V], g[V], w[V], dot = 0;
  const auto read = [&](int j) {
    load_numbers<T, V>(v, x + j);
    load_numbers<T, V>(g, grad_y + j);
    load_numbers<T, V>(w, weight + j);
#pragma unroll
    for (int i = 0; i < V; i++) g[i] *= w[i];
  };
  for (int j = lane * V; j < p.width; j += 32 * V) {
    read(j);
#pragma unroll
    for (int i = 0; i < V; i++) dot += g[i] * v[i];
  }
  const C mean = rstd * rstd * warp_sum(dot) * static_cast<C>(p.inverse_width);
  for (int j = lane * V; j < p.width; j += 32 * V) {
    read(j);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = rstd * (g[i] - v[i] * mean);
    store_numbers<T, V>(grad_x + j, v);
  }
}

// parts[s] = sum over the rows of span s of grad_y * x * rstd. grid: spans * rms_column_blocks
template <class T>
__global__ void __launch_bounds__(kRmsThreads) rms_grad_weight_parts(const RmsTask p) {
  using C = Compute<T>;
  const int columns = (p.width + kRmsThreads - 1) / kRmsThreads;
  const int span = blockIdx.x / columns, j = blockIdx.x % columns * kRmsThreads + threadIdx.x;
  if (j >= p.width) return;
  const int64_t begin = int64_t(span) * p.span, end = min(begin + p.span, p.rows);
  C sum = 0;
  for (int64_t row = begin; row < end; row++)
    sum += ptx::to_float(static_cast<const T*>(p.grad_y)[row * p.width + j]) *
           ptx::to_float(static_cast<const T*>(p.x)[row * p.x_row + j]) * static_cast<const C*>(p.rstd)[row];
  static_cast<C*>(p.parts)[int64_t(span) * p.width + j] = sum;
}

// grid: rms_column_blocks
template <class T>
__global__ void __launch_bounds__(kRmsThreads) rms_grad_weight(const RmsTask p) {
  const int j = blockIdx.x * kRmsThreads + threadIdx.x;
  if (j >= p.width) return;
  Compute<T> sum = 0;
  for (int s = 0; s < p.spans; s++) sum += static_cast<const Compute<T>*>(p.parts)[int64_t(s) * p.width + j];
  store_one(static_cast<T*>(p.grad_weight) + j, sum);
}

}  // namespace attnjourney
