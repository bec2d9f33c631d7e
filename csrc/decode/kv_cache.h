// Operators that write caches of keys and values: append, truncate, reorder; dense, ring and paged. All of them check
// everything before they write anything.
//
// New tokens of a sequence may be fewer than the tensors' N: they are the last counts[b] of the N, as query rows are
// the last of their sequence (padding on the left).
#pragma once
#include "cache_checks.h"
#include "core/aten.h"

namespace attnjourney {

struct AppendInputs {
  Tensor key_cache;            // dense (batch, heads, capacity, dim); paged (num_blocks, heads, block_size, dim)
  OptionalTensor value_cache;  // the same with v_dim; None for a cache of one tensor (latents)
  Tensor lengths;              // (batch,) int64
  Tensor key;                  // (batch, heads, N, dim)
  OptionalTensor value;        // (batch, heads, N, v_dim)
  OptionalTensor counts;       // (batch,) int64 from 0 to N; default: N for all
};

// batch < 0: the caches' first dimension is that of key (dense)
void check_append(const AppendInputs& in, bool paged);

// block_table (batch, max_blocks) int32, block_refs (num_blocks,) int32: how many sequences hold a block, 0: free
void check_paged(const Tensor& lengths, const Tensor& block_table, const Tensor& block_refs);
// lowest: (batch,), what new_lengths must not go below
void check_truncate(const Tensor& lengths, const Tensor& new_lengths, const OptionalTensor& lowest);
void check_reorder(const Tensor& key_cache, const OptionalTensor& value_cache, const Tensor& lengths,
                   const Tensor& batch_index);

// the pool of a paged cache beside its counts
void check_pool(const Tensor& key_cache, const Tensor& block_refs);

}  // namespace attnjourney
