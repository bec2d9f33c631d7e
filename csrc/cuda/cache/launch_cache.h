// From the entries of the caches to their kernels (inst/cache/). unit: bytes of the pieces in which rows are copied, 1,
// 2, 4, 8 or 16; scales: of caches of bytes, count 0 where there are none.
#pragma once
#include "cuda/kernels/cache/task.cuh"
#include "cuda/launch.h"

namespace attnjourney {

void launch_cache_append(const AppendTask&, int unit, cudaStream_t);  // and what moves the lengths on
void launch_cache_append_bytes(const AppendTask&, const AppendBytes&, Number tokens, cudaStream_t);
void advance_lengths(const AppendTask&, cudaStream_t);  // after an append by several blocks
void launch_cache_truncate(int64_t* lengths, const int64_t* new_lengths, const int64_t* lowest, int batch,
                           cudaStream_t);
void launch_cache_reorder(const CacheTensors&, const CacheTensors& scales, ReorderTask, int64_t* lengths, int unit,
                          cudaStream_t);
void launch_cache_gather(const GatherTask&, int sequences, int unit, cudaStream_t);
void launch_cache_expand(const GatherTask&, int sequences, Number to, cudaStream_t);
void launch_dequantize(ByteKind, const unsigned char* bytes, int64_t pitch, const float* scale, void* out, Number,
                       int rows, int dim, int parts, cudaStream_t);
void launch_paged_plan(PagedTask, const CacheTensors& scales, int unit, cudaStream_t);  // and shared blocks are copied
void launch_paged_truncate(const PagedTask&, cudaStream_t);
void launch_paged_reorder(const PagedTask&, int64_t* lengths, cudaStream_t);

constexpr int reorder_bytes = 96 << 10;            // of shared memory
constexpr int reorder_batch = reorder_bytes / 16;  // sequences that are reordered at once
static_assert(reorder_bytes <= kSmallShared);

}  // namespace attnjourney
