// Joins what the blocks that share a row's indices found (SparseTask::splits), always in the same order.
#pragma once
#include "task.cuh"

namespace attnjourney {

// grid: rows, as lse has them; shared memory: a weight for each split.
constexpr int kSparseMergeThreads = 128;
template <class Real>
constexpr int kSparseMergeSmem = kMostSparseSplits * static_cast<int>(sizeof(Real));
static_assert(kMostSparseSplits <= 32);  // a lane for each

template <class T>
__global__ void __launch_bounds__(kSparseMergeThreads) sparse_merge(const __grid_constant__ SparseTask task) {
  using Real = Compute<T>;
  const int lane = threadIdx.x % 32, dim = static_cast<int>(task.params.v_head_dim);
  const int64_t rows = sparse_rows(task), place = blockIdx.x;
  Real* const weights = reinterpret_cast<Real*>(ptx::dynamic_smem());
  RowStats<Real> own{-Real(INFINITY), 0};  // of this lane's split: its reference, and the sum of its weights
  if (lane < task.splits) own = static_cast<const RowStats<Real>*>(task.part_stats)[lane * rows + place];
  Real top = own.reference;
#pragma unroll
  for (int w = 16; w > 0; w /= 2) {
    const Real other = ptx::shfl_xor(top, w);
    top = other > top ? other : top;
  }
  const Real weight = ptx::exp2(own.reference - (top == -Real(INFINITY) ? Real(0) : top));
  const Real sum = warp_sum(own.inverse * weight);
  const Real factor = end_sparse_row(task, place, top, sum, threadIdx.x == 0);
  if (threadIdx.x < 32 && lane < task.splits) weights[lane] = weight;
  __syncthreads();  // @weights_there
  const Real* const from = static_cast<const Real*>(task.part_out) + place * dim;
  for (int column = threadIdx.x; column < dim; column += kSparseMergeThreads) {
    Real x = 0;
#pragma unroll 8
    for (int s = 0; s < task.splits; s++) x += weights[s] * from[s * rows * dim + column];
    store_one(static_cast<T*>(task.out) + place * dim + column, x * factor);
  }
}

}  // namespace attnjourney
