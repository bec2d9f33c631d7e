// Gradients of sinks and of ALiBi's slopes: one number for each head, or for each head of each batch item; sums in an
// order that does not change. One block for each number.
#pragma once
#include "backward_passes.cuh"

namespace attnjourney {

constexpr int kHeadsBytes = kPassThreads / 32 * 8;

template <class Real>
__device__ __forceinline__ Real block_sum(Real x) {
  Real* parts = reinterpret_cast<Real*>(ptx::dynamic_smem());
#pragma unroll
  for (int m = 1; m < 32; m *= 2) x += ptx::shfl_xor(x, m);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int w = 0; w < kPassThreads / 32; w++) x += parts[w];
  return x;
}

// the batch items that a block sums over
struct BlockItems {
  int head, first, end;
  template <class Task>
  __device__ __forceinline__ BlockItems(const Task& p, bool per_item)
      : head(blockIdx.x % p.q_heads), first(0), end(p.batch) {
    if (!per_item) return;
    first = blockIdx.x / p.q_heads;
    end = first + 1;
  }
};

// d sink = -sum over the rows of the sink's weight times delta: after backward_prepare. Slopes: after the kernel
// itself.
template <bool Sinks, class Real>
__global__ void __launch_bounds__(kPassThreads) backward_per_head(const BackwardTaskOf<Real> p) {
  const BlockItems items(p, Sinks ? p.sinks_per_item : p.slopes_per_item);
  Real sum = 0;
  for (int b = items.first; b < items.end; b++) {
    const bool packed = p.cu_q != nullptr;
    const int64_t pair = int64_t(b) * p.q_heads + items.head, first = scratch_row(p, b, items.head);
    if (Sinks) {
      const Real sink = sink_score(p.scores, p.scores.sinks[pair]);
      const int rows = packed ? sequence_of<true>(p, b).rows : p.rows;
      for (int r = threadIdx.x; r < (rows + p.tile_rows - 1) / p.tile_rows * p.tile_rows; r += kPassThreads)
        sum -=
            ptx::exp2((sink - p.reference[first + r]) * p.scores.exponent) * p.inverse[first + r] * p.delta[first + r];
    } else {
      const int64_t tile = packed ? first_packed_tile(p.cu_k, p.tile_keys, b) : int64_t(b) * p.key_tiles;
      const int tiles = packed ? (sequence_of<true>(p, b).k_rows + p.tile_keys - 1) / p.tile_keys : p.key_tiles;
      for (int i = threadIdx.x; i < tiles; i += kPassThreads) sum += p.slope_sum[(tile + i) * p.q_heads + items.head];
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) (Sinks ? p.grad_sinks : p.grad_slopes)[blockIdx.x] = sum;
}

}  // namespace attnjourney
