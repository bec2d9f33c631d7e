// From the entries of the caches to their kernels (inst/cache/cache.cu). unit: bytes of the pieces in which rows are
// copied, 2, 4, 8 or 16.
#pragma once
#include "cuda/kernels/cache/task.cuh"
#include "cuda/launch.h"

namespace attnjourney {

void launch_cache_append(const AppendTask&, int unit, cudaStream_t);  // and what moves the lengths on
void launch_cache_truncate(int64_t* lengths, const int64_t* new_lengths, const int64_t* lowest, int batch,
                           cudaStream_t);
void launch_cache_reorder(const CacheTensors&, ReorderTask, int64_t* lengths, int unit, cudaStream_t);
void launch_cache_gather(const GatherTask&, int sequences, int unit, cudaStream_t);
void launch_paged_append(const PagedTask&, const AppendTask&, int unit, cudaStream_t);
void launch_paged_truncate(const PagedTask&, cudaStream_t);
void launch_paged_reorder(const PagedTask&, int64_t* lengths, cudaStream_t);

constexpr int reorder_bytes = 96 << 10;            // of shared memory
constexpr int reorder_batch = reorder_bytes / 16;  // sequences that are reordered at once
static_assert(reorder_bytes <= kSmallShared);

}  // namespace attnjourney
