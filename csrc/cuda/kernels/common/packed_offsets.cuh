// Offsets of packed sequences as kernels may rely on them, without a look at them from the host: they begin with 0,
// never fall and end at `total` at most; a number that does not fit counts as the nearest that does. And the order in
// which the forward takes sequences: those of most rows first, so that the last tiles are small ones; more than
// kMostOrdered, which would take more than a microsecond or two, as they lie.
#pragma once
#include "cuda/ptx/sm80.cuh"

namespace attnjourney {

constexpr int kMostOrdered = 512;
constexpr int kOffsetsThreads = 256, kOffsetsBytes = kOffsetsThreads / 32 * 4;

// What `combine` makes of the threads' x up to this one's, and of `so_far`, which then is that of all. parts: a word
// for each warp
template <class Combine>
__device__ __forceinline__ int scanned(int x, int& so_far, int* parts, Combine&& combine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = static_cast<int>(ptx::shfl(static_cast<uint32_t>(x), max(lane - d, 0)));
    if (lane >= d) x = combine(x, other);
  }
  if (lane == 31) parts[warp] = x;
  __syncthreads();  // @parts_written
  x = combine(x, so_far);
  for (int w = 0; w < kOffsetsThreads / 32; w++) {
    if (w < warp) x = combine(x, parts[w]);
    so_far = combine(so_far, parts[w]);
  }
  __syncthreads();  // @parts_read
  return x;
}

// order [items], then offsets [items + 1] of sequences in that order; a thread looks at all of them for each of its own
__device__ __forceinline__ void order_by_length(const int* offsets, int items, int* order, int* parts) {
  const int tid = threadIdx.x;
  if (items > kMostOrdered) {
    for (int i = tid; i <= items; i += kOffsetsThreads) {
      if (i < items) order[i] = i;
      order[items + i] = offsets[i];
    }
    return;
  }
  const auto rows = [&](int item) { return offsets[item + 1] - offsets[item]; };
  for (int i = tid; i < items; i += kOffsetsThreads) {
    const int own = rows(i);
    int before = 0;
    for (int j = 0; j < items; j++) before += rows(j) > own || (rows(j) == own && j < i);
    order[before] = i;
  }
  __syncthreads();  // @order_known
  int all = 0;
  for (int first = 0; first < items; first += kOffsetsThreads) {
    const int i = first + tid;
    const int end = scanned(i < items ? rows(order[i]) : 0, all, parts, [](int a, int b) { return a + b; });
    if (i < items) order[items + 1 + i] = end;
  }
  if (tid == 0) order[items] = 0;
}

// one block; order: see order_by_length, or null
template <class Int>
__global__ void __launch_bounds__(kOffsetsThreads)
    packed_offsets(const Int* given, int count, int total, int* out, int* order) {
  int* const parts = reinterpret_cast<int*>(ptx::dynamic_smem());
  int most = 0;  // so far
  for (int first = 0; first < count; first += kOffsetsThreads) {
    const int i = first + threadIdx.x;
    const Int own = i > 0 && i < count ? given[i] : Int(0);
    const int x = own < 0 ? 0 : own < total ? static_cast<int>(own) : total;
    const int largest = scanned(x, most, parts, [](int a, int b) { return max(a, b); });
    if (i < count) out[i] = largest;
  }
  if (!order) return;
  __syncthreads();  // @offsets_known
  order_by_length(out, count - 1, order, parts);
}

}  // namespace attnjourney
