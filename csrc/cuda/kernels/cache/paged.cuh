// Blocks of a paged cache: who takes which, and who gives them back. Free blocks are taken from the lowest number up,
// in the order of the sequences, as on the CPU: the same table at every call. One block of threads plans for all.
#pragma once
#include "lengths.cuh"

namespace attnjourney {

constexpr int kPlanThreads = 1024, kPlanWords = 8, kPlanBlocks = kPlanThreads * kPlanWords;
constexpr int kPlanBytes = 2 * kPlanThreads / 32 * 4;

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
// go. takes[4 * item + 3]: the block that a sequence goes on in, -1: none.
__device__ __forceinline__ bool copies_block(const PagedTask& task, int item, int block) {
  int holders = static_cast<int>(task.refs[block]);
  for (int other = 0; other < item && holders > 1; other++) holders -= task.takes[4 * other + 3] == block;
  return holders > 1;
}

// Sum of x, the same in all threads of a warp, over the warps before this one, and over all. One barrier; the next call
// takes another `sums`.
__device__ __forceinline__ int sum_of_warps(int x, int* sums, int& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  static_assert(kPlanThreads == 32 * 32);
  if (lane == 0) sums[warp] = x;
  __syncthreads();
  int sum = sums[lane];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = static_cast<int>(ptx::shfl(static_cast<uint32_t>(sum), lane >= d ? lane - d : lane));
    if (lane >= d) sum += below;
  }
  all = static_cast<int>(ptx::shfl(static_cast<uint32_t>(sum), 31));
  return static_cast<int>(ptx::shfl(static_cast<uint32_t>(sum), warp)) - x;
}
// The same of an x of each thread, over the threads before this one.
__device__ __forceinline__ int sum_before(int x, int* sums, int& all) {
  const int lane = threadIdx.x % 32;
  int sum = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = static_cast<int>(ptx::shfl(static_cast<uint32_t>(sum), lane >= d ? lane - d : lane));
    if (lane >= d) sum += below;
  }
  const int of_warp = static_cast<int>(ptx::shfl(static_cast<uint32_t>(sum), 31));
  return sum_of_warps(of_warp, sums, all) + sum - x;
}

// One block: plans an append, takes the blocks, and moves the lengths on. Shared memory: kPlanBytes. Where nothing is
// wanted no count is read, else 8192 at a time, about a microsecond: no list of free blocks that callers, who may write
// the counts themselves, would have to keep.
__global__ void __launch_bounds__(kPlanThreads, 1) paged_plan(const PagedTask task) {
  int* const all_sums = reinterpret_cast<int*>(ptx::dynamic_smem());  // of each warp, in turns
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  int turn = 0;
  const auto sums = [&] { return all_sums + (turn ^= kPlanThreads / 32); };
  for (int item = tid; item < task.batch; item += kPlanThreads) {
    const int entry = PagedGrowth(task, item).open_entry(task);
    task.takes[4 * item + 3] = entry < 0 ? -1 : block_at(task, item, entry);
  }
  __syncthreads();  // @open_blocks
  int wanted = 0;   // by all
  for (int first = 0; first < task.batch; first += kPlanThreads) {
    const int item = first + tid;
    int mine = 0;
    if (item < task.batch) {
      const PagedGrowth growth(task, item);
      const int open = task.takes[4 * item + 3];
      const bool copies = open >= 0 && copies_block(task, item, open);
      mine = growth.end_new - growth.first_new + copies;
      task.takes[4 * item + 2] = copies ? open : -1;
    }
    int all;
    const int before = sum_before(mine, sums(), all);
    if (item < task.batch) task.takes[4 * item] = mine, task.takes[4 * item + 1] = wanted + before;
    wanted += all;
  }
  // Free blocks from the lowest number up: a warp looks at kPlanWords * 32 at once, all loads on their way together,
  // and no further than to as many as are wanted.
  int found = 0;
  for (int first = 0; first < task.blocks && found < wanted; first += kPlanBlocks) {
    const int own = first + warp * (32 * kPlanWords) + lane;
    uint32_t is_free[kPlanWords];
#pragma unroll
    for (int i = 0; i < kPlanWords; i++) is_free[i] = own + 32 * i < task.blocks ? task.refs[own + 32 * i] : 1;
    int count = 0;
#pragma unroll
    for (int i = 0; i < kPlanWords; i++)
      is_free[i] = ptx::ballot(is_free[i] == 0), count += ptx::count_bits(is_free[i]);
    int all;
    int at = found + sum_of_warps(count, sums(), all);
#pragma unroll
    for (int i = 0; i < kPlanWords; i++) {
      const int mine = at + ptx::count_bits(is_free[i] & ((1u << lane) - 1));
      if ((is_free[i] >> lane & 1) && mine < wanted) {
        task.free[mine] = own + 32 * i;
        task.refs[own + 32 * i] = 1;
      }
      at += ptx::count_bits(is_free[i]);
    }
    found += all;
  }
  __syncthreads();  // @blocks_known: every block to take
  for (int item = tid; item < task.batch; item += kPlanThreads) {
    const PagedGrowth growth(task, item);
    int next = task.takes[4 * item + 1];
    const auto take = [&] {
      const int i = next++;
      return i < found ? task.free[i] : -1;
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
