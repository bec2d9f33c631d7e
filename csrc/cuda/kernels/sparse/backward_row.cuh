// What the two backward kernels of token-sparse attention do to a pair's products.
#pragma once
#include "task.cuh"

namespace attnjourney {

// An item's statistics, and the keys that it may see.
template <class Real>
struct SparseRow {
  Real reference, inverse, delta;
  int limit;
  __device__ __forceinline__ SparseRow(const SparseTask& t, const SparseUnit& unit, int item)
      : reference(0), inverse(0), delta(0), limit(unit.limit(t, item)) {
    if (item >= unit.items) return;
    const int64_t place = unit.place(t, item);
    const RowStats<Real> stats = static_cast<const RowStats<Real>*>(t.stats)[place];
    reference = stats.reference, inverse = stats.inverse;
    delta = static_cast<const Real*>(t.delta)[place];
  }
  // weight and derivative by scale * q . k from the products q . k and grad_out . v
  __device__ __forceinline__ void pair(const SparseTask& t, int key, Real product, Real of_values, Real& weight,
                                       Real& gradient) const {
    weight = gradient = 0;
    if (key < 0 || key >= limit) return;
    Real slope = 1;
    weight = ptx::exp2(sparse_score<Real>(t, product, &slope) - reference) * inverse;
    gradient = weight * (of_values - delta) * slope;
  }
};

// delta of every row, a warp each.
constexpr int kSparsePassThreads = 256;
inline int64_t sparse_delta_blocks(const SparseTask& t) {
  constexpr int kRows = kSparsePassThreads / 32;
  return (int64_t{t.batch} * t.kv_heads * t.group * t.params.q_len + kRows - 1) / kRows;
}
template <class T>
__global__ void __launch_bounds__(kSparsePassThreads) sparse_delta(const __grid_constant__ SparseTask task) {
  using Real = Compute<T>;
  const int heads = task.kv_heads * task.group, dim = static_cast<int>(task.params.v_head_dim);
  const int64_t place = int64_t{blockIdx.x} * (kSparsePassThreads / 32) + threadIdx.x / 32;
  const int64_t length = task.params.q_len, pair = place / length;
  if (pair >= int64_t{task.batch} * heads) return;
  const T* const out = static_cast<const T*>(task.out) + place * dim;
  const T* const grad = static_cast<const T*>(task.grad_out) + pair / heads * task.g.batch +
                        pair % heads * task.g.head + (place - pair * length) * task.g.row;
  Real sum = 0;
  for (int d = threadIdx.x % 32; d < dim; d += 32) sum += Real(ptx::to_float(out[d])) * Real(ptx::to_float(grad[d]));
  sum = warp_sum(sum);
  if (task.grad_lse) sum -= static_cast<const Real*>(task.grad_lse)[place];
  if (threadIdx.x % 32 == 0) static_cast<Real*>(task.delta)[place] = sum;
}

// d sink = -sum over the rows of the sink's weight times delta. One block for each number that there is.
template <class Real>
__global__ void __launch_bounds__(kSparsePassThreads) sparse_sinks(const __grid_constant__ SparseTask task) {
  Real* const parts = reinterpret_cast<Real*>(ptx::dynamic_smem());
  const int heads = task.kv_heads * task.group, head = blockIdx.x % heads;
  const int first = task.shared_sinks ? 0 : blockIdx.x / heads, last = task.shared_sinks ? task.batch : first + 1;
  Real sum = 0;
  for (int b = first; b < last; b++) {
    const int64_t pair = int64_t{b} * heads + head;
    const Real sink = static_cast<const Real*>(task.sinks)[pair] * Real(log2_e);
    for (int64_t r = threadIdx.x; r < task.params.q_len; r += kSparsePassThreads) {
      const int64_t place = pair * task.params.q_len + r;
      const RowStats<Real> stats = static_cast<const RowStats<Real>*>(task.stats)[place];
      const bool alone = stats.inverse == Real(0);  // the row sees no key
      const Real weight = !alone ? ptx::exp2(sink - stats.reference) * stats.inverse : sink == -Real(INFINITY) ? 0 : 1;
      sum -= weight * static_cast<const Real*>(task.delta)[place];
    }
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  sum = 0;
  for (int w = 0; w < kSparsePassThreads / 32; w++) sum += parts[w];
  static_cast<Real*>(task.grad_sinks)[blockIdx.x] = sum;
}

}  // namespace attnjourney
