// Rows of caches as bytes, and how new tokens are written (csrc/decode/kv_cache.h says what the operators mean). Values
// are on the device, so nothing is refused: what does not fit is not written, and a length goes on counting.
#pragma once
#include "cuda/ptx/sm80.cuh"
#include "task.cuh"

namespace attnjourney {

__device__ __forceinline__ int new_tokens(const int64_t* counts, int batch, int tokens) {
  if (!counts) return tokens;
  const int64_t n = counts[batch];
  return n < 0 ? 0 : n < tokens ? static_cast<int>(n) : tokens;
}

// f(row, unit) for this block's part of `rows` rows of `units` pieces; the threads of a row are neighbours.
template <class F>
__device__ __forceinline__ void each_unit(int rows, int units, int part, int parts, F&& f) {
  int lanes = 1;
  while (lanes < units && lanes < 32) lanes *= 2;
  const int at_once = kCacheThreads / lanes, first = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  for (int64_t row = int64_t{part} * at_once + first; row < rows; row += int64_t{parts} * at_once)
    for (int u = lane; u < units; u += lanes) f(static_cast<int>(row), u);
}

// One sequence's part of an append.
struct NewTokens {
  int batch, count, oldest;  // a ring keeps the last
  int64_t have, limit;
  __device__ __forceinline__ NewTokens(const AppendTask& task, int batch_)
      : batch(batch_), count(new_tokens(task.counts, batch_, task.tokens)) {
    const int64_t length = task.plan ? task.plan[batch] : task.lengths[batch];
    have = length < 0 ? 0 : length;
    limit = task.ring ? have + count : task.table ? int64_t{task.max_blocks} * task.block_size : task.capacity;
    oldest = task.ring && count > task.capacity ? count - task.capacity : 0;
  }
  // Where token t goes: outer and slot; false: nowhere.
  __device__ __forceinline__ bool place(const AppendTask& task, int t, int64_t& outer, int64_t& slot) const {
    const int64_t at = have + t;
    if (t < oldest || at >= limit) return false;
    outer = batch, slot = at;
    if (task.ring) slot = at % task.capacity;
    if (task.table) {
      const int j = static_cast<int>(at / task.block_size);
      outer = task.table[static_cast<int64_t>(batch) * task.max_blocks + j], slot = at - int64_t{j} * task.block_size;
      if (outer < 0 || outer >= task.blocks) return false;
    }
    return true;
  }
  // Token t of a sequence's new ones is token tokens - count + t of those given.
  __device__ __forceinline__ const unsigned char* given(const AppendTask& task, int tensor, int head, int t) const {
    return task.fresh[tensor].at(batch, head, task.tokens - count + t);
  }
  // With one part, and without a plan, the length moves on here. All threads of the block.
  __device__ __forceinline__ void move_length(const AppendTask& task) const {
    if (task.parts > 1 || task.plan) return;
    __syncthreads();
    if (threadIdx.x == 0) task.lengths[batch] = have + count;
  }
};

// grid: batch * parts
template <class Unit>
__global__ void __launch_bounds__(kCacheThreads, 6) cache_append(const AppendTask task) {
  const int part = blockIdx.x % task.parts;
  const NewTokens fresh(task, blockIdx.x / task.parts);
  for (int i = 0; i < task.to.count; i++)
    each_unit(task.heads * fresh.count, task.to.units[i], part, task.parts, [&](int row, int unit) {
      const int head = row / fresh.count, t = row - head * fresh.count;
      int64_t outer, slot;
      if (!fresh.place(task, t, outer, slot)) return;
      reinterpret_cast<Unit*>(task.to.cache[i].at(outer, head, slot))[unit] =
          reinterpret_cast<const Unit*>(fresh.given(task, i, head, t))[unit];
    });
  fresh.move_length(task);
}

// grid: one thread for each sequence
__device__ __forceinline__ int sequence_number() { return blockIdx.x * kCacheThreads + threadIdx.x; }

// ---- reordering ----

__device__ __forceinline__ int source_of(const int64_t* index, int item, int batch) {
  return index[item] >= 0 && index[item] < batch ? static_cast<int>(index[item]) : item;
}

// grid: heads * ceil(pieces of a head / width)
template <class Unit>
__global__ void __launch_bounds__(kCacheThreads) cache_reorder(const ReorderTask task) {
  Unit* const held = reinterpret_cast<Unit*>(ptx::dynamic_smem());  // [batch][width]
  const int units = task.units, width = task.width, head = blockIdx.x % task.heads;
  const int64_t first = int64_t{blockIdx.x / task.heads} * width;
  // f(unit in memory, unit held) of every sequence that changes, as far as what it becomes is long
  const auto each = [&](auto&& f) {
    for (int i = threadIdx.x; i < task.batch * width; i += kCacheThreads) {
      const int item = i / width, from = source_of(task.index, item, task.batch);
      const int64_t piece = first + i - item * width, slot = piece / units;
      if (from == item || slot >= task.capacity || slot >= task.lengths[from]) continue;
      const auto at = [&](int outer) {
        return reinterpret_cast<Unit*>(task.rows.at(outer, head, slot)) + piece % units;
      };
      f(at(from), at(item), held[i]);
    }
  };
  each([](const Unit* from, Unit*, Unit& here) { here = *from; });
  __syncthreads();
  each([](const Unit*, Unit* to, Unit& here) { *to = here; });
}

// ---- keys in one piece, for kernels that read dense tensors ----

constexpr int kNear = 128;  // keys next to those that rows see, which a tile of the reader may hold

// grid: sequences * parts
template <class Unit>
__global__ void __launch_bounds__(kCacheThreads) cache_gather(const GatherTask task) {
  const int i = blockIdx.x / task.parts, part = blockIdx.x % task.parts, batch = task.first_sequence + i;
  const DecodeSequence s = decode_sequence<false>(task.cache, batch);
  const int count = s.keys.key_length;
  if (part == 0 && threadIdx.x == 0) task.held[i] = count;
  for (int t = 0; t < task.from.count; t++)
    each_unit(task.heads * count, task.from.units[t], part, task.parts, [&](int row, int unit) {
      const int head = row / count, key = row - head * count;
      if (s.seen.between(key, kNear)) return;
      const Place at = place_of_key(task.cache, s, batch, key);
      Unit x{};
      if (at.outer >= 0) x = reinterpret_cast<const Unit*>(task.from.cache[t].at(at.outer, head, at.slot))[unit];
      reinterpret_cast<Unit*>(task.to[t].at(i, head, key))[unit] = x;
    });
}

}  // namespace attnjourney
