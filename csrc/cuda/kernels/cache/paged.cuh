// Blocks of a paged cache: who takes which, and who gives them back. Free blocks are taken from the lowest number up,
// in the order of the sequences, as on the CPU: the same table at every call. One block of threads plans for all.
#pragma once
#include "lengths.cuh"

namespace attnjourney {

__device__ __forceinline__ int64_t blocks_for(int64_t tokens, int size) { return (tokens + size - 1) / size; }

// One sequence's part of an append.
struct PagedGrowth {
  int64_t have;
  int count, first_new, end_new;  // entries of the table that get a block
  __device__ __forceinline__ PagedGrowth(const PagedTask& task, int item) {
    have = task.lengths[item] < 0 ? 0 : task.lengths[item];
    count = new_tokens(task.counts, item, task.tokens);
    const auto entries = [&](int64_t length) {
      const int64_t n = blocks_for(length, task.block_size);
      return static_cast<int>(n < task.max_blocks ? n : task.max_blocks);
    };
    first_new = entries(have), end_new = entries(have + count);
  }
  // the entry of a block that is written in part, else -1
  __device__ __forceinline__ int open_entry(const PagedTask& task) const {
    const int64_t j = have / task.block_size;
    return count > 0 && have % task.block_size != 0 && j < task.max_blocks ? static_cast<int>(j) : -1;
  }
};

// the block of an entry, -1: none
__device__ __forceinline__ int block_at(const PagedTask& task, int item, int entry) {
  const int block = task.table[static_cast<int64_t>(item) * task.max_blocks + entry];
  return block < task.blocks ? block : -1;
}

// Does sequence b copy the block that it goes on in? The last holder does not; sequences before b that copy have let
// go.
__device__ __forceinline__ bool copies_block(const PagedTask& task, int item, int block) {
  int holders = static_cast<int>(task.refs[block]);
  for (int other = 0; other < item && holders > 1; other++) {
    const PagedGrowth growth(task, other);
    const int entry = growth.open_entry(task);
    if (entry >= 0 && block_at(task, other, entry) == block) holders--;
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
__global__ void __launch_bounds__(kCacheThreads) paged_plan(const PagedTask task) {
  int* const sums = reinterpret_cast<int*>(ptx::dynamic_smem());  // of each warp
  const int tid = threadIdx.x;
  int wanted = 0;  // by all
  for (int first = 0; first < task.batch; first += kCacheThreads) {
    const int item = first + tid;
    int mine = 0;
    if (item < task.batch) {
      const PagedGrowth growth(task, item);
      const int entry = growth.open_entry(task), shared = entry < 0 ? -1 : block_at(task, item, entry);
      const bool copies = shared >= 0 && copies_block(task, item, shared);
      mine = growth.end_new - growth.first_new + copies;
      task.takes[4 * item + 2] = copies ? shared : -1;
    }
    int all;
    const int before = sum_before(mine, sums, all);
    if (item < task.batch) task.takes[4 * item] = mine, task.takes[4 * item + 1] = wanted + before;
    wanted += all;
  }
  int found = 0;
  for (int first = 0; first < task.blocks && found < wanted; first += kCacheThreads) {
    const int block = first + tid;
    const bool is_free = block < task.blocks && task.refs[block] == 0;
    int all;
    const int at = found + sum_before(is_free, sums, all);
    if (is_free && at < wanted) task.free[at] = block;
    found += all;
  }
  __syncthreads();  // @counts_read: every free block is known
  for (int item = tid; item < task.batch; item += kCacheThreads) {
    const PagedGrowth growth(task, item);
    int next = task.takes[4 * item + 1];
    const auto take = [&] {
      const int i = next++;
      if (i >= found) return -1;
      task.refs[task.free[i]] = 1;
      return task.free[i];
    };
    int* const row = task.table + static_cast<int64_t>(item) * task.max_blocks;
    const int shared = task.takes[4 * item + 2];
    int to = -1;
    if (shared >= 0) {  // let go in any case: without a free block what it held is lost
      to = row[growth.have / task.block_size] = take();
      ptx::atomic_add(task.refs + shared, ~0u);
    }
    task.takes[4 * item + 3] = to;
    for (int j = growth.first_new; j < growth.end_new; j++) row[j] = take();
    task.plan[item] = growth.have;
    task.lengths[item] = growth.have + growth.count;
  }
}

// grid: batch * heads. What a sequence has in a shared block goes into its own before anyone writes.
template <class Unit>
__global__ void __launch_bounds__(kCacheThreads) paged_copy(const PagedTask task) {
  const int item = blockIdx.x / task.heads, h = blockIdx.x % task.heads, to = task.takes[4 * item + 3];
  if (to < 0) return;
  const int from = task.takes[4 * item + 2], count = static_cast<int>(task.plan[item] % task.block_size);
  for (int i = 0; i < task.pools.count; i++)
    each_unit(count, task.pools.units[i], 0, 1, [&](int slot, int unit) {
      const CacheRows& rows = task.pools.cache[i];
      reinterpret_cast<Unit*>(rows.at(to, h, slot))[unit] = reinterpret_cast<const Unit*>(rows.at(from, h, slot))[unit];
    });
}

// grid: batch. Blocks behind the new length go back.
__global__ void __launch_bounds__(kCacheThreads) paged_truncate(const PagedTask task) {
  const int item = blockIdx.x;
  const int64_t have = task.lengths[item] < 0 ? 0 : task.lengths[item],
                asked = task.new_lengths[item] < 0 ? 0 : task.new_lengths[item];
  const int64_t length = asked < have ? asked : have, entries = blocks_for(have, task.block_size);
  for (int64_t j = blocks_for(length, task.block_size) + threadIdx.x; j < entries && j < task.max_blocks;
       j += kCacheThreads) {
    const int block = block_at(task, item, static_cast<int>(j));
    if (block >= 0) ptx::atomic_add(task.refs + block, ~0u);
    task.table[static_cast<int64_t>(item) * task.max_blocks + j] = -1;
  }
  __syncthreads();
  if (threadIdx.x == 0) task.lengths[item] = length;
}

// grid: ceil(max_blocks / width): columns of the table pass through shared memory, [batch][width]
__global__ void __launch_bounds__(kCacheThreads) paged_reorder(const PagedTask task, int width) {
  int* const held = reinterpret_cast<int*>(ptx::dynamic_smem());
  const auto each = [&](auto&& f) {
    for (int i = threadIdx.x; i < task.batch * width; i += kCacheThreads) {
      const int item = i / width, j = blockIdx.x * width + i - item * width,
                from = source_of(task.index, item, task.batch);
      if (j < task.max_blocks && from != item) f(item, j, from, held[i]);
    }
  };
  each([&](int, int j, int from, int& here) { here = block_at(task, from, j); });
  __syncthreads();
  each([&](int item, int j, int, int& here) {
    const int old = block_at(task, item, j);
    if (old >= 0) ptx::atomic_add(task.refs + old, ~0u);
    if (here >= 0) ptx::atomic_add(task.refs + here, 1);
    task.table[static_cast<int64_t>(item) * task.max_blocks + j] = here;
  });
}

}  // namespace attnjourney
