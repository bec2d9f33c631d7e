// Scaled dot-product attention: softmax(scale * query key^T + mask) value, per head, in O(len) memory.
// The operators `attention_forward` and `attention_backward`, their legal inputs, and what a device must supply.
#pragma once
#include <array>
#include <optional>

#include "core/aten.h"
#include "core/checks.h"
#include "params.h"

namespace attnjourney {

// A mask of blocks, see attention/params.h: offsets (..., heads, row blocks + 1) int32, leading dimensions broadcast;
// index and partial (blocks,) int32; elements (partial blocks, size, size) bool.
struct BlockTensors {
  Tensor offsets, index, partial, elements;
};

struct AttentionOptions {
  OptionalTensor attn_mask;  // broadcasts to (..., heads, q_len, kv_len); bool (true = may attend) or floating (added)
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale;  // default 1 / sqrt(head_dim)
  bool enable_gqa = false;
  OptionalTensor dropout_seed;                // int64 scalar; needed when dropout_p > 0
  int64_t causal_alignment = 0;               // of causal, window and ALiBi: 0 top-left, 1 bottom-right
  std::array<int64_t, 2> window = {-1, -1};   // keys p - left .. p + right of row position p; -1 unbounded
  int64_t prefix_length = 0;                  // the first keys, seen by every row
  OptionalTensor key_lengths, query_lengths;  // (batch,) int32 or int64: what lies beyond does not exist
  double softcap = 0;                         // score -> softcap * tanh(score / softcap), before any mask; 0 none
  OptionalTensor sinks, alibi_slopes;         // (heads,) or (batch, heads)
  OptionalTensor cu_seqlens_q, cu_seqlens_k;  // (sequences + 1,): packed sequences; tensors (heads, total, dim)
  std::optional<BlockTensors> blocks = std::nullopt;  // in place of attn_mask
};

constexpr int max_batch_dims = 16;

// How one tensor is reached from (batch index, head). A dimension of size 1 that broadcasts has stride 0.
struct HeadMap {
  int64_t batch_stride[max_batch_dims] = {};
  int64_t head_stride = 0;
  int64_t head_div = 1;  // head h of the call reads head h / head_div of the tensor
};

// The checked call. (batch dims..., q_heads, q_len, head_dim); rank 2 has no head dimension, rank 3 no batch dimension.
struct AttentionCall {
  int rank = 0, batch_dims = 0;
  int64_t batch_size[max_batch_dims] = {};
  int64_t batch = 1;     // their product
  int64_t q_heads = 1;   // after broadcasting
  int64_t kv_heads = 1;  // key/value heads that differ; q_heads = group * kv_heads
  AttentionParams params;
  HeadMap query, key, value, mask;  // mask: of attn_mask or of the offsets of a mask of blocks
  bool bottom_right = false;
  bool packed = false;  // batch counts sequences, and each has its part of the length dimension
  ScalarType dtype = ScalarType::Float, lse_dtype = ScalarType::Float;

  std::vector<int64_t> leading() const;  // (batch dims..., q_heads) as far as the rank has them
};

// Checks every argument (shapes, dtypes, devices, numbers) and derives the call. Throws with the argument's name.
AttentionCall check_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                              const AttentionOptions& options);

// attn_mask beside query: dtype, device, and a shape that broadcasts to `want`; numbers per head: (heads,) or (batch,
// heads). Throw with the argument's name.
void check_mask_tensor(const Tensor& mask, const std::vector<int64_t>& want, const Tensor& query);
void check_per_head(const char* name, const OptionalTensor& t, int64_t batch, int64_t heads, const Tensor& query);

// How attn_mask, or its gradient, is reached: strides of its rows and columns, 0 where it broadcasts.
HeadMap mask_map(const AttentionCall& call, const Tensor& mask, int64_t& row, int64_t& col);

// Fills in the strides of a tensor shaped (batch dims..., heads, len, dim), e.g. out or grad_out.
HeadMap head_map(const AttentionCall& call, const Tensor& t, int64_t heads);

// Gradients to be written, nullopt where none is wanted. Query, key and value: shapes after broadcasting of batch and
// head dimensions, the last one dense. The others are contiguous and summed over what their own shapes leave out:
// attn_mask anything that broadcasts to (..., heads, q_len, kv_len); sinks and alibi_slopes (heads,) or (batch, heads).
struct AttentionGradients {
  OptionalTensor query, key, value, attn_mask, sinks, alibi_slopes;
  bool any() const { return query || key || value || attn_mask || sinks || alibi_slopes; }
};

// Directions of derivatives: of the shape and dtype of what they belong to, nullopt for zero.
struct AttentionTangents {
  OptionalTensor query, key, value, attn_mask, sinks, alibi_slopes;
  OptionalTensor grad_out, grad_lse;
  OptionalTensor out, lse;  // what the jvp writes and that of the backward reads
};

// What a device supplies; the derivatives of the two may be missing. out (..., q_len, v_head_dim) may have any strides
// with a dense last dimension; lse is dense.
struct AttentionBackend {
  void (*forward)(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions&, Tensor& out,
                  Tensor& lse);
  void (*backward)(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
                   const Tensor& value, const AttentionOptions&, const Tensor& out, const Tensor& lse,
                   AttentionGradients& gradients);
  // the derivative of forward in the direction of `tangents`, into tangents.out and tangents.lse
  void (*jvp)(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions&, const Tensor& out,
              const Tensor& lse, const AttentionTangents& tangents) = nullptr;
  // the derivative of backward, where tangents.out and tangents.lse are those that jvp gives
  void (*backward_jvp)(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
                       const Tensor& value, const AttentionOptions&, const Tensor& out, const Tensor& lse,
                       const AttentionTangents& tangents, AttentionGradients& gradients) = nullptr;
};
extern const AttentionBackend cpu_attention;  // csrc/cpu/attention/forward.cpp

}  // namespace attnjourney
