// Offsets of packed sequences as kernels may rely on them, without a look at them from the host: they begin with 0,
// never fall and end at `total` at most; a number that does not fit counts as the nearest that does.
#pragma once
#include "cuda/ptx/sm80.cuh"

namespace attnjourney {

constexpr int kOffsetsThreads = 256, kOffsetsBytes = kOffsetsThreads / 32 * 4;

// one block
template <class Int>
__global__ void __launch_bounds__(kOffsetsThreads) packed_offsets(const Int* given, int count, int total, int* out) {
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  int* parts = reinterpret_cast<int*>(ptx::dynamic_smem());  // the largest number of each warp
  int most = 0;                                              // so far
  for (int first = 0; first < count; first += kOffsetsThreads) {
    const int i = first + tid;
    const Int own = i > 0 && i < count ? given[i] : Int(0);
    int x = own < 0 ? 0 : own < total ? static_cast<int>(own) : total;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {  // the largest of the lanes up to this one
      const int other = static_cast<int>(ptx::shfl(static_cast<uint32_t>(x), max(lane - d, 0)));
      x = max(x, other);
    }
    if (lane == 31) parts[warp] = x;
    __syncthreads();
    x = max(x, most);
    for (int w = 0; w < kOffsetsThreads / 32; w++) {
      if (w < warp) x = max(x, parts[w]);
      most = max(most, parts[w]);
    }
    if (i < count) out[i] = x;
    __syncthreads();  // @parts_read
  }
}

}  // namespace attnjourney
