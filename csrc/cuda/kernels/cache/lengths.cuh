// The kernels that change lengths alone. They are no templates: one file compiles them.
#pragma once
#include "cache_rows.cuh"

namespace attnjourney {

// Lengths move on after an append by several blocks.
__global__ void __launch_bounds__(kCacheThreads)
    cache_advance(int64_t* lengths, const int64_t* counts, int batch, int tokens) {
  const int item = sequence_number();
  if (item >= batch) return;
  const int64_t have = lengths[item];
  lengths[item] = (have < 0 ? 0 : have) + new_tokens(counts, item, tokens);
}

// lengths become new_lengths, but never more than they are, nor less than `lowest` or 0
__global__ void __launch_bounds__(kCacheThreads)
    cache_truncate(int64_t* lengths, const int64_t* new_lengths, const int64_t* lowest, int batch) {
  const int item = sequence_number();
  if (item >= batch) return;
  const int64_t have = lengths[item], low = lowest && lowest[item] > 0 ? lowest[item] : 0;
  int64_t wanted = new_lengths[item] > low ? new_lengths[item] : low;
  lengths[item] = wanted < have ? wanted : have < 0 ? 0 : have;
}

// One block; shared memory for `batch` numbers.
__global__ void __launch_bounds__(kCacheThreads)
    cache_reorder_lengths(int64_t* lengths, const int64_t* index, int batch) {
  int64_t* const held = reinterpret_cast<int64_t*>(ptx::dynamic_smem());
  for (int item = threadIdx.x; item < batch; item += kCacheThreads) held[item] = lengths[source_of(index, item, batch)];
  __syncthreads();
  for (int item = threadIdx.x; item < batch; item += kCacheThreads) lengths[item] = held[item];
}

}  // namespace attnjourney
