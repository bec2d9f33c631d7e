// Token-sparse attention: each row of query (or block of rows) attends to the keys that its indices name. Legal inputs,
// the operators over what a device supplies.
#pragma once
#include "core/arguments.h"
#include "params.h"

namespace attnjourney {

struct SparseInputs {
  Tensor query;    // (batch, q_heads, q_len, head_dim)
  Tensor key;      // (batch, kv_heads, kv_len, head_dim)
  Tensor value;    // (batch, kv_heads, kv_len, v_head_dim); may be a part of key's memory
  Tensor indices;  // (batch, blocks, index_count) or (batch, kv_heads, blocks, index_count), int32 or int64;
                   // blocks = ceil(q_len / query_block_size)
  std::optional<double> scale;  // default 1 / sqrt(head_dim)
  bool enable_gqa = false;
  bool is_causal = false;
  int64_t causal_alignment = 0;  // 0 top-left, 1 bottom-right
  OptionalTensor key_lengths;    // (batch,) int32 or int64
  double softcap = 0;
  OptionalTensor sinks;  // (q_heads,) or (batch, q_heads), query's dtype or float
  int64_t query_block_size = 1;
};

struct SparseCall {
  int64_t batch = 0, q_heads = 0, kv_heads = 0;
  int64_t blocks = 0;             // rows of the indices
  bool indices_per_head = false;  // of key/value heads
  SparseParams params;
  ScalarType dtype = ScalarType::Float, lse_dtype = ScalarType::Float;
};

SparseCall check_sparse_attention(const SparseInputs& in);

// of the forward, dense: out (batch, q_heads, q_len, v_head_dim), lse (batch, q_heads, q_len), stats (..., 2): as
// HeadPointers has them
struct SparseResults {
  Tensor out, lse, stats;
};
struct SparseSaved {
  Tensor grad_out;          // like out, dense rows
  OptionalTensor grad_lse;  // like lse, dense
  SparseResults results;    // dense
};
// in the shapes of what they belong to, dense; none where not wanted
struct SparseGradients {
  OptionalTensor query, key, value, sinks;
};

struct SparseBackend {
  void (*forward)(const SparseCall&, const SparseInputs&, const SparseResults&);
  void (*backward)(const SparseCall&, const SparseInputs&, const SparseSaved&, const SparseGradients&);
};

struct Backend;
// out, lse, stats
std::vector<Tensor> sparse_attention_forward(const Backend&, Arguments&);
// of query, key, value, sinks: bit i of need asks for gradient i
std::vector<Tensor> sparse_attention_backward(const Backend&, Arguments&);

}  // namespace attnjourney
