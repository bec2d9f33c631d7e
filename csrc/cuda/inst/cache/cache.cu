// The kernels of the caches, for every size of piece.
#include "cuda/cache/launch_cache.h"
#include "cuda/kernels/cache/paged.cuh"

namespace attnjourney {
namespace {

template <class F>
void with_unit(int unit, F&& f) {
  if (unit == 16) return f.template operator()<uint4>();
  if (unit == 8) return f.template operator()<uint2>();
  if (unit == 4) return f.template operator()<uint32_t>();
  f.template operator()<uint16_t>();
}

int sequence_blocks(int batch) { return (batch + kCacheThreads - 1) / kCacheThreads; }

void reorder_lengths(int64_t* lengths, const int64_t* index, int batch, cudaStream_t stream) {
  launch_kernel(cache_reorder_lengths, 1, kCacheThreads, batch * 8, stream, lengths, index, batch);
}

// pieces of every sequence that fit into shared memory together, at most 128
int reorder_width(int batch, int bytes) {
  const int width = reorder_bytes / (batch * bytes);
  return width < 1 ? 1 : width < 128 ? width : 128;
}

}  // namespace

void launch_cache_append(const AppendTask& p, int unit, cudaStream_t stream) {
  with_unit(unit, [&]<class Unit>() {
    launch_kernel(cache_append<Unit>, int64_t{p.batch} * p.parts, kCacheThreads, 0, stream, p);
  });
  if (p.parts > 1 && !p.plan)
    launch_kernel(cache_advance, sequence_blocks(p.batch), kCacheThreads, 0, stream, p.lengths, p.counts, p.batch,
                  p.tokens);
}

void launch_cache_truncate(int64_t* lengths, const int64_t* new_lengths, const int64_t* lowest, int batch,
                           cudaStream_t stream) {
  launch_kernel(cache_truncate, sequence_blocks(batch), kCacheThreads, 0, stream, lengths, new_lengths, lowest, batch);
}

void launch_cache_reorder(const CacheTensors& tensors, ReorderTask p, int64_t* lengths, int unit, cudaStream_t stream) {
  with_unit(unit, [&]<class Unit>() {
    p.width = reorder_width(p.batch, sizeof(Unit));
    for (int i = 0; i < tensors.count; i++) {
      p.rows = tensors.cache[i], p.units = tensors.units[i];
      const int64_t blocks = (int64_t{p.capacity} * p.units + p.width - 1) / p.width * p.heads;
      launch_kernel(cache_reorder<Unit>, blocks, kCacheThreads, p.batch * p.width * int(sizeof(Unit)), stream, p);
    }
  });
  reorder_lengths(lengths, p.index, p.batch, stream);
}

void launch_cache_gather(const GatherTask& p, int sequences, int unit, cudaStream_t stream) {
  with_unit(unit, [&]<class Unit>() {
    launch_kernel(cache_gather<Unit>, int64_t{sequences} * p.parts, kCacheThreads, 0, stream, p);
  });
}

void launch_paged_append(const PagedTask& p, const AppendTask& tokens, int unit, cudaStream_t stream) {
  launch_kernel(paged_plan, 1, kCacheThreads, kCacheThreads / 32 * 4, stream, p);
  with_unit(unit, [&]<class Unit>() {
    launch_kernel(paged_copy<Unit>, int64_t{p.batch} * p.heads, kCacheThreads, 0, stream, p);
  });
  launch_cache_append(tokens, unit, stream);
}

void launch_paged_truncate(const PagedTask& p, cudaStream_t stream) {
  launch_kernel(paged_truncate, p.batch, kCacheThreads, 0, stream, p);
}

void launch_paged_reorder(const PagedTask& p, int64_t* lengths, cudaStream_t stream) {
  const int width = reorder_width(p.batch, 4);
  launch_kernel(paged_reorder, (p.max_blocks + width - 1) / width, kCacheThreads, p.batch * width * 4, stream, p,
                width);
  reorder_lengths(lengths, p.index, p.batch, stream);
}

}  // namespace attnjourney
