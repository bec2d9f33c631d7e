// The passes around the walk of linear attention; 256 threads a block.
#pragma once
#include "rows.cuh"

namespace attnjourney {

constexpr int kLinearPassThreads = 256;

inline int64_t linear_scan_blocks(const LinearScan& p) {
  const int64_t numbers = int64_t{p.rows} * p.cols + p.vector;
  return (numbers * p.heads + kLinearPassThreads - 1) / kLinearPassThreads;
}
inline int64_t linear_prepare_blocks(const LinearPrepare& p) {
  constexpr int kRows = kLinearPassThreads / 32;
  return (p.rows + kRows - 1) / kRows;
}

// One thread for each number of the state of a head.
template <class C>
__global__ void __launch_bounds__(kLinearPassThreads) linear_scan(const LinearScan p) {
  const int64_t i = int64_t(blockIdx.x) * kLinearPassThreads + threadIdx.x;
  const int numbers = p.rows * p.cols + p.vector;
  const int head = static_cast<int>(i / numbers), n = static_cast<int>(i - int64_t(head) * numbers);
  if (head >= p.heads) return;
  const bool in_matrix = n < p.rows * p.cols;
  const int row = in_matrix ? n / p.cols : 0, col = in_matrix ? n - row * p.cols : n - p.rows * p.cols;
  const auto place = [&](const LinearState& s) -> C* {
    C* base = static_cast<C*>(in_matrix ? s.matrix : s.vector);
    if (!base) return nullptr;
    return base + (in_matrix ? head * s.head + row * s.row + col * s.col : head * s.vector_head + col);
  };
  const C* first = place(p.first);
  C* const states = place(p.states);
  C* const last = place(p.last);
  const int64_t step = in_matrix ? p.states.piece : p.states.vector_piece;
  C sum = first ? *first : C(0);
#pragma unroll 4
  for (int k = 0; k < p.pieces; k++) {
    C& s = states[(p.reverse ? p.pieces - 1 - k : k) * step];
    const C own = s;
    if (!p.total) s = sum;
    sum += own;
  }
  if (p.total && states) *states = sum;
  if (last) *last = sum;
}

// One warp for each row.
template <class T>
__global__ void __launch_bounds__(kLinearPassThreads) linear_prepare(const LinearPrepare p) {
  using C = typename LinearElement<T>::C;
  const int64_t row = int64_t(blockIdx.x) * (kLinearPassThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.rows) return;
  const int64_t pair = row / p.length, at = row - pair * p.length;
  const T* grad_out =
      static_cast<const T*>(p.grad_out) + pair / p.q_heads * p.batch + pair % p.q_heads * p.head + at * p.row;
  const T* out = static_cast<const T*>(p.out) + row * p.cols;
  const C denominator = static_cast<const C*>(p.denominator)[row];
  const C inverse = denominator == C(0) ? C(0) : C(1) / denominator;
  C sum = 0;
  for (int e = lane; e < p.cols; e += 32) sum += ptx::to_float(grad_out[e]) * inverse * ptx::to_float(out[e]);
  sum = warp_sum(sum);
  if (lane) return;
  if (p.grad_denominator) sum -= static_cast<const C*>(p.grad_denominator)[row];
  static_cast<C*>(p.inverse)[row] = inverse;
  static_cast<C*>(p.grad)[row] = -sum;
}

}  // namespace attnjourney
