// Operators that write caches of keys and values: append, truncate, reorder; dense, ring and paged. All of them check
// everything before they write anything.
//
// New tokens of a sequence may be fewer than the tensors' N: they are the last counts[b] of the N, as query rows are
// the last of their sequence (padding on the left).
#pragma once
#include "cache_checks.h"
#include "core/arguments.h"

namespace attnjourney {

struct AppendInputs {
  Tensor key_cache;            // dense (batch, heads, capacity, dim); paged (num_blocks, heads, block_size, dim)
  OptionalTensor value_cache;  // the same with v_dim; None for a cache of one tensor (latents)
  Tensor lengths;              // (batch,) int64
  Tensor key;                  // (batch, heads, N, dim)
  OptionalTensor value;        // (batch, heads, N, v_dim)
  OptionalTensor counts;       // (batch,) int64 from 0 to N; default: N for all
  // of caches of bytes (decode.h), which then quantise tokens of float32, bfloat16 or float16: a cache's shape but for
  // the last dimension
  OptionalTensor key_scale = {}, value_scale = {};
};

struct ReorderInputs {
  Tensor key_cache;
  OptionalTensor value_cache;
  Tensor lengths, batch_index;
  OptionalTensor key_scale = {}, value_scale = {};
};

// of a paged cache
struct PagedTables {
  Tensor lengths;      // (batch,) int64
  Tensor block_table;  // (batch, max_blocks) int32
  Tensor block_refs;   // (num_blocks,) int32: how many sequences hold a block, 0: free
};

// What a device supplies: it is given what is checked but for the values in tensors.
struct CacheBackend {
  void (*append)(const AppendInputs&, bool ring) = nullptr;
  void (*truncate)(const Tensor& lengths, const Tensor& new_lengths, const OptionalTensor& lowest) = nullptr;
  void (*reorder)(const ReorderInputs&) = nullptr;
  void (*paged_append)(const AppendInputs&, const PagedTables&) = nullptr;
  void (*paged_truncate)(const PagedTables&, const Tensor& new_lengths, int64_t block_size) = nullptr;
  void (*paged_reorder)(const PagedTables&, const Tensor& batch_index) = nullptr;
};

struct Backend;
void kv_cache_append(const Backend&, Arguments&);
void kv_cache_truncate(const Backend&, Arguments&);  // lowest: (batch,), what new_lengths must not go below
void kv_cache_reorder(const Backend&, Arguments&);
void paged_cache_append(const Backend&, Arguments&);
void paged_cache_truncate(const Backend&, Arguments&);
void paged_cache_reorder(const Backend&, Arguments&);

}  // namespace attnjourney
