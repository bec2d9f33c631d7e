// The passes around the walk of linear attention; 256 threads a block.
#pragma once
#include "row_tiles.cuh"

namespace attnjourney {

constexpr int kLinearPassThreads = 256;

inline int64_t linear_scan_blocks(const LinearScan& task) {
  const int64_t numbers = int64_t{task.rows} * task.cols + task.vector;
  return (numbers * task.heads + kLinearPassThreads - 1) / kLinearPassThreads;
}
inline int64_t linear_prepare_blocks(const LinearPrepare& task) {
  constexpr int kRows = kLinearPassThreads / 32;
  return (task.rows + kRows - 1) / kRows;
}

// One thread for each number of the state of a head.
template <class Real>
__global__ void __launch_bounds__(kLinearPassThreads) linear_scan(const LinearScan task) {
  const int64_t i = int64_t(blockIdx.x) * kLinearPassThreads + threadIdx.x;
  const int numbers = task.rows * task.cols + task.vector;
  const int head = static_cast<int>(i / numbers), n = static_cast<int>(i - int64_t(head) * numbers);
  if (head >= task.heads) return;
  const bool in_matrix = n < task.rows * task.cols;
  const int row = in_matrix ? n / task.cols : 0, col = in_matrix ? n - row * task.cols : n - task.rows * task.cols;
  const auto place = [&](const LinearState& s) -> Real* {
    Real* base = static_cast<Real*>(in_matrix ? s.matrix : s.vector);
    if (!base) return nullptr;
    return base + (in_matrix ? head * s.head + row * s.row + col * s.col : head * s.vector_head + col);
  };
  const Real* first = place(task.first);
  Real* const states = place(task.states);
  Real* const last = place(task.last);
  const int64_t step = in_matrix ? task.states.piece : task.states.vector_piece;
  Real sum = first ? *first : Real(0);
#pragma unroll 4
  for (int k = 0; k < task.pieces; k++) {
    Real& s = states[(task.reverse ? task.pieces - 1 - k : k) * step];
    const Real own = s;
    if (!task.total) s = sum;
    sum += own;
  }
  if (task.total && states) *states = sum;
  if (last) *last = sum;
}

// One warp for each row.
template <class T>
__global__ void __launch_bounds__(kLinearPassThreads) linear_prepare(const LinearPrepare task) {
  using Real = typename LinearElement<T>::Real;
  const int64_t row = int64_t(blockIdx.x) * (kLinearPassThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= task.rows) return;
  const int64_t pair = row / task.length, at = row - pair * task.length;
  const T* grad_out = static_cast<const T*>(task.grad_out) + pair / task.q_heads * task.batch +
                      pair % task.q_heads * task.head + at * task.row;
  const T* out = static_cast<const T*>(task.out) + row * task.cols;
  const Real denominator = static_cast<const Real*>(task.denominator)[row];
  const Real inverse = denominator == Real(0) ? Real(0) : Real(1) / denominator;
  Real sum = 0;
  for (int e = lane; e < task.cols; e += 32) sum += ptx::to_float(grad_out[e]) * inverse * ptx::to_float(out[e]);
  sum = warp_sum(sum);
  if (lane) return;
  if (task.grad_denominator) sum -= static_cast<const Real*>(task.grad_denominator)[row];
  static_cast<Real*>(task.inverse)[row] = inverse;
  static_cast<Real*>(task.grad)[row] = -sum;
}

}  // namespace attnjourney
