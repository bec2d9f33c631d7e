// The CPU's decoding and caches: DecodeBackend and CacheBackend.
#pragma once
#include "decode/decode.h"
#include "decode/kv_cache.h"

namespace attnjourney {

void cpu_decode(const DecodeCall&, const DecodeInputs&, const Tensor& out, const Tensor& lse);
// for many query rows
void decode_tiled(const DecodeCall&, const DecodeInputs&, const Tensor& query, const Tensor& out, const Tensor& lse);
void cpu_dequantize(const Tensor& bytes, const Tensor& scale, const Tensor& out);              // see Dequantize
void cpu_head_products(const Tensor& x, const Tensor& w, bool transposed, const Tensor& out);  // see HeadProducts

void cpu_cache_append(const AppendInputs&, bool ring);
void cpu_cache_truncate(const Tensor& lengths, const Tensor& new_lengths, const OptionalTensor& lowest);
void cpu_cache_reorder(const ReorderInputs&);
void cpu_paged_append(const AppendInputs&, const PagedTables&);
void cpu_paged_truncate(const PagedTables&, const Tensor& new_lengths, int64_t block_size);
void cpu_paged_reorder(const PagedTables&, const Tensor& batch_index);

}  // namespace attnjourney
