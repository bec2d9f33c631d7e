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

// grid: batch * parts. Token t of a sequence's new ones is token tokens - count + t of those given. With one part, and
// without a plan, the length moves on here.
template <class Unit>
__global__ void __launch_bounds__(kCacheThreads, 8) cache_append(const AppendTask p) {
  const int batch = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
  const int count = new_tokens(p.counts, batch, p.tokens);
  const int64_t length = p.plan ? p.plan[batch] : p.lengths[batch], have = length < 0 ? 0 : length;
  const int64_t limit = p.ring ? have + count : p.table ? int64_t{p.max_blocks} * p.block_size : p.capacity;
  const int oldest = p.ring && count > p.capacity ? count - p.capacity : 0;  // a ring keeps the last
  for (int i = 0; i < p.to.count; i++)
    each_unit(p.heads * count, p.to.units[i], part, p.parts, [&](int row, int unit) {
      const int h = row / count, t = row - h * count;
      const int64_t at = have + t;
      if (t < oldest || at >= limit) return;
      int64_t outer = batch, slot = at;
      if (p.ring) slot = at % p.capacity;
      if (p.table) {
        const int j = static_cast<int>(at / p.block_size);
        outer = p.table[static_cast<int64_t>(batch) * p.max_blocks + j], slot = at - int64_t{j} * p.block_size;
        if (outer < 0 || outer >= p.blocks) return;
      }
      reinterpret_cast<Unit*>(p.to.cache[i].at(outer, h, slot))[unit] =
          reinterpret_cast<const Unit*>(p.fresh[i].at(batch, h, p.tokens - count + t))[unit];
    });
  if (p.parts > 1 || p.plan) return;
  __syncthreads();
  if (threadIdx.x == 0) p.lengths[batch] = have + count;
}

// grid: one thread for each sequence
__device__ __forceinline__ int sequence_number() { return blockIdx.x * kCacheThreads + threadIdx.x; }

// Lengths move on after an append by several blocks.
__global__ void __launch_bounds__(kCacheThreads)
    cache_advance(int64_t* lengths, const int64_t* counts, int batch, int tokens) {
  const int b = sequence_number();
  if (b >= batch) return;
  const int64_t have = lengths[b];
  lengths[b] = (have < 0 ? 0 : have) + new_tokens(counts, b, tokens);
}

// lengths become new_lengths, but never more than they are, nor less than `lowest` or 0
__global__ void __launch_bounds__(kCacheThreads)
    cache_truncate(int64_t* lengths, const int64_t* new_lengths, const int64_t* lowest, int batch) {
  const int b = sequence_number();
  if (b >= batch) return;
  const int64_t have = lengths[b], low = lowest && lowest[b] > 0 ? lowest[b] : 0;
  int64_t wanted = new_lengths[b] > low ? new_lengths[b] : low;
  lengths[b] = wanted < have ? wanted : have < 0 ? 0 : have;
}

// ---- reordering ----

__device__ __forceinline__ int source_of(const int64_t* index, int b, int batch) {
  return index[b] >= 0 && index[b] < batch ? static_cast<int>(index[b]) : b;
}

// grid: heads * ceil(pieces of a head / width)
template <class Unit>
__global__ void __launch_bounds__(kCacheThreads) cache_reorder(const ReorderTask p) {
  Unit* const held = reinterpret_cast<Unit*>(ptx::dynamic_smem());  // [batch][width]
  const int units = p.units, width = p.width, h = blockIdx.x % p.heads;
  const int64_t first = int64_t{blockIdx.x / p.heads} * width;
  // f(unit in memory, unit held) of every sequence that changes, as far as what it becomes is long
  const auto each = [&](auto&& f) {
    for (int i = threadIdx.x; i < p.batch * width; i += kCacheThreads) {
      const int b = i / width, from = source_of(p.index, b, p.batch);
      const int64_t piece = first + i - b * width, slot = piece / units;
      if (from == b || slot >= p.capacity || slot >= p.lengths[from]) continue;
      const auto at = [&](int outer) { return reinterpret_cast<Unit*>(p.rows.at(outer, h, slot)) + piece % units; };
      f(at(from), at(b), held[i]);
    }
  };
  each([](const Unit* from, Unit*, Unit& here) { here = *from; });
  __syncthreads();
  each([](const Unit*, Unit* to, Unit& here) { *to = here; });
}

// One block; shared memory for `batch` numbers.
__global__ void __launch_bounds__(kCacheThreads)
    cache_reorder_lengths(int64_t* lengths, const int64_t* index, int batch) {
  int64_t* const held = reinterpret_cast<int64_t*>(ptx::dynamic_smem());
  for (int b = threadIdx.x; b < batch; b += kCacheThreads) held[b] = lengths[source_of(index, b, batch)];
  __syncthreads();
  for (int b = threadIdx.x; b < batch; b += kCacheThreads) lengths[b] = held[b];
}

// ---- keys in one piece, for kernels that read dense tensors ----

constexpr int kNear = 128;  // keys beside those that rows see, which a tile of the reader may hold

// grid: sequences * parts
template <class Unit>
__global__ void __launch_bounds__(kCacheThreads) cache_gather(const GatherTask p) {
  const int i = blockIdx.x / p.parts, part = blockIdx.x % p.parts, batch = p.first_sequence + i;
  const DecodeSequence s = decode_sequence(p.cache, batch);
  const int count = s.keys.key_length;
  if (part == 0 && threadIdx.x == 0) p.held[i] = count;
  for (int t = 0; t < p.from.count; t++)
    each_unit(p.heads * count, p.from.units[t], part, p.parts, [&](int row, int unit) {
      const int h = row / count, key = row - h * count;
      if (key >= s.keys.prefix + kNear && key < s.begin - kNear) return;
      const Place at = place_of_key(p.cache, s, batch, key);
      Unit x{};
      if (at.outer >= 0) x = reinterpret_cast<const Unit*>(p.from.cache[t].at(at.outer, h, at.slot))[unit];
      reinterpret_cast<Unit*>(p.to[t].at(i, h, key))[unit] = x;
    });
}

}  // namespace attnjourney
