// A backward block's part of the gradient of a head's slope; backward_per_head adds the parts up.
#pragma once
#include "backward_task.cuh"
#include "cuda/ptx/sm80.cuh"

namespace attnjourney {

// The sum over the threads of a block, in thread 0; parts: a number for each warp, in shared memory.
template <int Warps, class Real>
__device__ __forceinline__ Real sum_of_warps(Real sum, Real* parts) {
#pragma unroll
  for (int m = 1; m < 32; m *= 2) sum += ptx::shfl_xor(sum, m);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  Real total = 0;
  if (threadIdx.x == 0)
    for (int w = 0; w < Warps; w++) total += parts[w];
  return total;
}

// sum: of this thread. All threads of the block.
template <int Keys, int Warps, class Real>
__device__ __forceinline__ void add_slopes(const BackwardTaskOf<Real>& p, const BackwardTile& where, int head, Real sum,
                                           Real* parts) {
  const Real total = sum_of_warps<Warps>(sum, parts);
  if (threadIdx.x != 0) return;
  const int slot = where.key_tile + (p.cu_q ? first_packed_tile(p.cu_k, Keys, where.batch) : where.batch * p.key_tiles);
  p.slope_sum[int64_t(slot) * p.q_heads + head] = total;
}

}  // namespace attnjourney
