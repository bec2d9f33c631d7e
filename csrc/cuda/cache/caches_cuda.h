// CUDA's caches: CacheBackend.
#pragma once
#include "decode/kv_cache.h"

namespace attnjourney {

void cuda_cache_append(const AppendInputs&, bool ring);
void cuda_cache_truncate(const Tensor& lengths, const Tensor& new_lengths, const OptionalTensor& lowest);
void cuda_cache_reorder(const ReorderInputs&);
void cuda_paged_append(const AppendInputs&, const PagedTables&);
void cuda_paged_truncate(const PagedTables&, const Tensor& new_lengths, int64_t block_size);
void cuda_paged_reorder(const PagedTables&, const Tensor& batch_index);

}  // namespace attnjourney
