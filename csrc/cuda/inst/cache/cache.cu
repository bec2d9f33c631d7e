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
  if (unit == 2) return f.template operator()<uint16_t>();
  f.template operator()<uint8_t>();
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

void launch_cache_append(const AppendTask& task, int unit, cudaStream_t stream) {
  with_unit(unit, [&]<class Unit>() {
    launch_kernel(cache_append<Unit>, int64_t{task.batch} * task.parts, kCacheThreads, 0, stream, task);
  });
  advance_lengths(task, stream);
}

void advance_lengths(const AppendTask& task, cudaStream_t stream) {
  if (task.parts > 1 && !task.plan)
    launch_kernel(cache_advance, sequence_blocks(task.batch), kCacheThreads, 0, stream, task.lengths, task.counts,
                  task.batch, task.tokens);
}

void launch_cache_truncate(int64_t* lengths, const int64_t* new_lengths, const int64_t* lowest, int batch,
                           cudaStream_t stream) {
  launch_kernel(cache_truncate, sequence_blocks(batch), kCacheThreads, 0, stream, lengths, new_lengths, lowest, batch);
}

void launch_cache_reorder(const CacheTensors& tensors, const CacheTensors& scales, ReorderTask task, int64_t* lengths,
                          int unit, cudaStream_t stream) {
  const auto reorder = [&]<class Unit>(const CacheTensors& some) {
    task.width = reorder_width(task.batch, sizeof(Unit));
    for (int i = 0; i < some.count; i++) {
      task.rows = some.cache[i], task.units = some.units[i];
      const int64_t blocks = (int64_t{task.capacity} * task.units + task.width - 1) / task.width * task.heads;
      launch_kernel(cache_reorder<Unit>, blocks, kCacheThreads, task.batch * task.width * int(sizeof(Unit)), stream,
                    task);
    }
  };
  with_unit(unit, [&]<class Unit>() { reorder.template operator()<Unit>(tensors); });
  reorder.template operator()<uint32_t>(scales);
  reorder_lengths(lengths, task.index, task.batch, stream);
}

void launch_cache_gather(const GatherTask& task, int sequences, int unit, cudaStream_t stream) {
  with_unit(unit, [&]<class Unit>() {
    launch_kernel(cache_gather<Unit>, int64_t{sequences} * task.parts, kCacheThreads, 0, stream, task);
  });
}

void launch_paged_plan(PagedTask task, const CacheTensors& scales, int unit, cudaStream_t stream) {
  launch_kernel(paged_plan, 1, kPlanThreads, kPlanBytes, stream, task);
  const int64_t blocks = int64_t{task.batch} * task.heads;
  with_unit(unit, [&]<class Unit>() { launch_kernel(paged_copy<Unit>, blocks, kCacheThreads, 0, stream, task); });
  task.pools = scales;
  if (scales.count) launch_kernel(paged_copy<uint32_t>, blocks, kCacheThreads, 0, stream, task);
}

void launch_paged_truncate(const PagedTask& task, cudaStream_t stream) {
  launch_kernel(paged_truncate, task.batch, kCacheThreads, 0, stream, task);
}

void launch_paged_reorder(const PagedTask& task, int64_t* lengths, cudaStream_t stream) {
  const int width = reorder_width(task.batch, 4);
  launch_kernel(paged_reorder, (task.max_blocks + width - 1) / width, kCacheThreads, task.batch * width * 4, stream,
                task, width);
  reorder_lengths(lengths, task.index, task.batch, stream);
}

}  // namespace attnjourney
