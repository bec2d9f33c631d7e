// A backward block's part of the gradient of a head's slope; backward_per_head adds the parts up.
#pragma once
#include "backward_task.cuh"
#include "cuda/ptx/sm80.cuh"

namespace attnjourney {

// sum: of this thread; parts: a number for each warp, in shared memory. All threads of the block.
template <int Keys, int Warps, class Real>
__device__ __forceinline__ void add_slopes(const BackwardTaskOf<Real>& p, const BackwardTile& where, int head, Real sum,
                                           Real* parts) {
  const int tid = threadIdx.x;
#pragma unroll
  for (int m = 1; m < 32; m *= 2) sum += ptx::shfl_xor(sum, m);
  if (tid % 32 == 0) parts[tid / 32] = sum;
  __syncthreads();
  if (tid != 0) return;
  Real total = 0;
  for (int w = 0; w < Warps; w++) total += parts[w];
  const int slot = where.key_tile + (p.cu_q ? first_packed_tile(p.cu_k, Keys, where.batch) : where.batch * p.key_tiles);
  p.slope_sum[int64_t(slot) * p.q_heads + head] = total;
}

}  // namespace attnjourney
