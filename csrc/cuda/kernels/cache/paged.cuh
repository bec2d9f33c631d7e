// Blocks of a paged cache: who takes which, and who gives them back. Free blocks are taken from the lowest number up,
// in the order of the sequences, as on the CPU: the same table at every call.
#pragma once
#include "rows.cuh"

namespace attnjourney {

__device__ __forceinline__ int64_t blocks_for(int64_t tokens, int size) { return (tokens + size - 1) / size; }

// One sequence's part of an append.
struct PagedGrowth {
  int64_t have;
  int count, first_new, end_new;  // entries of the table that get a block
  __device__ __forceinline__ PagedGrowth(const PagedTask& p, int b) {
    have = p.lengths[b] < 0 ? 0 : p.lengths[b];
    count = new_tokens(p.counts, b, p.tokens);
    const auto entries = [&](int64_t length) {
      const int64_t n = blocks_for(length, p.block_size);
      return static_cast<int>(n < p.max_blocks ? n : p.max_blocks);
    };
    first_new = entries(have), end_new = entries(have + count);
  }
  // the entry of a block that is written in part, else -1
  __device__ __forceinline__ int open_entry(const PagedTask& p) const {
    const int64_t j = have / p.block_size;
    return count > 0 && have % p.block_size != 0 && j < p.max_blocks ? static_cast<int>(j) : -1;
  }
};

// the block of an entry, -1: none
__device__ __forceinline__ int block_at(const PagedTask& p, int b, int entry) {
  const int block = p.table[static_cast<int64_t>(b) * p.max_blocks + entry];
  return block < p.blocks ? block : -1;
}

// Does sequence b copy the block that it goes on in? The last holder does not; sequences before b that copy have let
// go.
__device__ __forceinline__ bool copies_block(const PagedTask& p, int b, int block) {
  int holders = static_cast<int>(p.refs[block]);
  for (int other = 0; other < b && holders > 1; other++) {
    const PagedGrowth g(p, other);
    const int entry = g.open_entry(p);
    if (entry >= 0 && block_at(p, other, entry) == block) holders--;
  }
  return holders > 1;
}

// Sum of x over the threads before this one, and over all: one barrier after it before `sums` is used again.
__device__ __forceinline__ int sum_before(int x, int* sums, int& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = static_cast<int>(ptx::shfl(static_cast<uint32_t>(sum), lane >= d ? lane - d : lane));
    if (lane >= d) sum += below;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int before = 0;
  all = 0;
  for (int w = 0; w < kCacheThreads / 32; w++) {
    if (w < warp) before += sums[w];
    all += sums[w];
  }
  __syncthreads();
  return before + sum - x;
}

// One block: plans an append, takes the blocks, and moves the lengths on.
__global__ void __launch_bounds__(kCacheThreads) paged_plan(const PagedTask p) {
  int* const sums = reinterpret_cast<int*>(ptx::dynamic_smem());  // of each warp
  const int tid = threadIdx.x;
  int wanted = 0;  // by all
  for (int first = 0; first < p.batch; first += kCacheThreads) {
    const int b = first + tid;
    int mine = 0;
    if (b < p.batch) {
      const PagedGrowth g(p, b);
      const int entry = g.open_entry(p), shared = entry < 0 ? -1 : block_at(p, b, entry);
      const bool copies = shared >= 0 && copies_block(p, b, shared);
      mine = g.end_new - g.first_new + copies;
      p.takes[4 * b + 2] = copies ? shared : -1;
    }
    int all;
    const int before = sum_before(mine, sums, all);
    if (b < p.batch) p.takes[4 * b] = mine, p.takes[4 * b + 1] = wanted + before;
    wanted += all;
  }
  int found = 0;
  for (int first = 0; first < p.blocks && found < wanted; first += kCacheThreads) {
    const int block = first + tid;
    const bool is_free = block < p.blocks && p.refs[block] == 0;
    int all;
    const int at = found + sum_before(is_free, sums, all);
    if (is_free && at < wanted) p.free[at] = block;
    found += all;
  }
  __syncthreads();  // @counts_read: every free block is known
  for (int b = tid; b < p.batch; b += kCacheThreads) {
    const PagedGrowth g(p, b);
    int next = p.takes[4 * b + 1];
    const auto take = [&] {
      const int i = next++;
      if (i >= found) return -1;
      p.refs[p.free[i]] = 1;
      return p.free[i];
    };
    int* const row = p.table + static_cast<int64_t>(b) * p.max_blocks;
    const int shared = p.takes[4 * b + 2];
    int to = -1;
    if (shared >= 0) {  // let go in any case: without a free block what it held is lost
      to = row[g.have / p.block_size] = take();
      ptx::atomic_add(p.refs + shared, ~0u);
    }
    p.takes[4 * b + 3] = to;
    for (int j = g.first_new; j < g.end_new; j++) row[j] = take();
    p.plan[b] = g.have;
    p.lengths[b] = g.have + g.count;
  }
}

// grid: batch * heads. What a sequence has in a shared block goes into its own before anyone writes.
template <class Unit>
__global__ void __launch_bounds__(kCacheThreads) paged_copy(const PagedTask p) {
  const int b = blockIdx.x / p.heads, h = blockIdx.x % p.heads, to = p.takes[4 * b + 3];
  if (to < 0) return;
  const int from = p.takes[4 * b + 2], count = static_cast<int>(p.plan[b] % p.block_size);
  for (int i = 0; i < p.pools.count; i++)
    each_unit(count, p.pools.units[i], 0, 1, [&](int slot, int unit) {
      const CacheRows& rows = p.pools.cache[i];
      reinterpret_cast<Unit*>(rows.at(to, h, slot))[unit] = reinterpret_cast<const Unit*>(rows.at(from, h, slot))[unit];
    });
}

// grid: batch. Blocks behind the new length go back.
__global__ void __launch_bounds__(kCacheThreads) paged_truncate(const PagedTask p) {
  const int b = blockIdx.x;
  const int64_t have = p.lengths[b] < 0 ? 0 : p.lengths[b], asked = p.new_lengths[b] < 0 ? 0 : p.new_lengths[b];
  const int64_t length = asked < have ? asked : have, entries = blocks_for(have, p.block_size);
  for (int64_t j = blocks_for(length, p.block_size) + threadIdx.x; j < entries && j < p.max_blocks;
       j += kCacheThreads) {
    const int block = block_at(p, b, static_cast<int>(j));
    if (block >= 0) ptx::atomic_add(p.refs + block, ~0u);
    p.table[static_cast<int64_t>(b) * p.max_blocks + j] = -1;
  }
  __syncthreads();
  if (threadIdx.x == 0) p.lengths[b] = length;
}

// grid: ceil(max_blocks / width): columns of the table pass through shared memory, [batch][width]
__global__ void __launch_bounds__(kCacheThreads) paged_reorder(const PagedTask p, int width) {
  int* const held = reinterpret_cast<int*>(ptx::dynamic_smem());
  const auto each = [&](auto&& f) {
    for (int i = threadIdx.x; i < p.batch * width; i += kCacheThreads) {
      const int b = i / width, j = blockIdx.x * width + i - b * width, from = source_of(p.index, b, p.batch);
      if (j < p.max_blocks && from != b) f(b, j, from, held[i]);
    }
  };
  each([&](int, int j, int from, int& here) { here = block_at(p, from, j); });
  __syncthreads();
  each([&](int b, int j, int, int& here) {
    const int old = block_at(p, b, j);
    if (old >= 0) ptx::atomic_add(p.refs + old, ~0u);
    if (here >= 0) ptx::atomic_add(p.refs + here, 1);
    p.table[static_cast<int64_t>(b) * p.max_blocks + j] = here;
  });
}

}  // namespace attnjourney
