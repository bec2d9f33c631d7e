// Scaled dot-product attention: softmax(scale * query key^T + mask) value, per head, in O(len) memory.
// The operators `attention_forward` and `attention_backward`, their legal inputs, and what a device must supply.
#pragma once
#include "options.h"
#include "params.h"

namespace attnjourney {

// Scales of numbers in e4m3 (fp8.h), and the dtype of the output beside them.
struct Fp8Scales {
  Tensor query, key, value;  // (batch, heads, blocks of fp8_scale_rows rows) float32; a size of 1 broadcasts
  ScalarType out_dtype;
};

// One call as it was made. Tensors of rank 2 have no heads, those of rank 3 no batch; size 1 broadcasts in both.
struct AttentionArgs {
  Tensor query;  // (batch dims..., q_heads, q_len, head_dim)
  Tensor key;    // (batch dims..., kv_heads, kv_len, head_dim)
  Tensor value;  // (batch dims..., kv_heads, kv_len, v_head_dim); beside a block_table, the two are caches
                 // (num_blocks, kv_heads, block_size, dim)
  AttentionOptions options;
  std::optional<Fp8Scales> fp8 = {};  // query, key and value are float8_e4m3fn
};

constexpr int max_batch_dims = 16;

// How one tensor is reached from (batch index, head). A dimension of size 1 that broadcasts has stride 0.
struct HeadMap {
  int64_t batch_stride[max_batch_dims] = {};
  int64_t head_stride = 0;
  int64_t head_div = 1;  // head h of the call reads head h / head_div of the tensor
};

// The checked call.
struct AttentionCall {
  AttentionArgs args;  // rows of query, key and value are dense
  int rank = 0, batch_dims = 0;
  int64_t batch_size[max_batch_dims] = {};
  int64_t batch = 1;     // their product
  int64_t q_heads = 1;   // after broadcasting
  int64_t kv_heads = 1;  // key/value heads that differ; q_heads = group * kv_heads
  AttentionParams params = {};
  HeadMap query_map = {}, key_map = {}, value_map = {};
  HeadMap query_scale_map = {}, key_scale_map = {}, value_scale_map = {};
  HeadMap mask_map = {};  // of attn_mask or of the offsets of a mask of blocks
  bool bottom_right = false;
  bool packed = false;  // batch counts sequences, and each has its part of the length dimension
  ScalarType dtype = ScalarType::Float, lse_dtype = ScalarType::Float;

  std::vector<int64_t> leading() const;  // (batch dims..., q_heads) as far as the rank has them
};

// The head's number in dropout's counter.
inline uint32_t dropout_head(const AttentionCall& c, int64_t batch, int64_t head) {
  const Origin& o = c.args.options.origin;
  return static_cast<uint32_t>(batch * (o.heads ? o.heads : c.q_heads) + o.head + head);
}

// Checks every argument (shapes, dtypes, devices, numbers) and derives the call. Throws with the argument's name.
AttentionCall check_attention(AttentionArgs args);

// attn_mask next to query: dtype, device, and a shape that broadcasts to `want`; numbers per head: (heads,) or (batch,
// heads). Throw with the argument's name.
void check_mask_tensor(const Tensor& mask, const std::vector<int64_t>& want, const Tensor& query);
void check_per_head(const char* name, const OptionalTensor& t, int64_t batch, int64_t heads, const Tensor& query);

// The options that attention and decoding check the same way.
double check_scale(const std::optional<double>& scale, int64_t head_dim);  // which is the default's
void check_alignment(int64_t causal_alignment);
// key_lengths and the like: `count` numbers, where it is given
void check_lengths(const char* name, const OptionalTensor&, int64_t count, const Tensor& query);
void check_prefix_length(int64_t prefix_length);
ScoreModifier check_score_options(const AttentionOptions& options, int64_t batch, int64_t heads, const Tensor& query);
// a bound of a window as KeyRanges has it
inline int64_t window_bound(int64_t n) { return n < 0 || n > KeyRanges::unbounded ? KeyRanges::unbounded : n; }

// How attn_mask, or its gradient, is reached: strides of its rows and columns, 0 where it broadcasts.
HeadMap mask_map(const AttentionCall& call, const Tensor& mask, int64_t& row, int64_t& col);

// Fills in the strides of a tensor shaped (batch dims..., heads, len, dim), e.g. out or grad_out.
HeadMap head_map(const AttentionCall& call, const Tensor& t, int64_t heads);

struct AttentionResults {
  Tensor out;    // (batch dims..., q_heads, q_len, v_head_dim), any strides with dense rows
  Tensor lse;    // (batch dims..., q_heads, q_len), dense
  Tensor stats;  // (batch dims..., q_heads, q_len, 2), dense: see HeadPointers
};

// What the backward reads besides the call: rows, lse and stats dense.
struct AttentionSaved {
  Tensor grad_out;          // like out
  OptionalTensor grad_lse;  // like lse
  Tensor out, lse, stats;   // the results of the forward

  void make_dense();  // as the backend takes them
};

// Gradients to be written, nullopt where none is wanted. Query, key and value: shapes after broadcasting of batch and
// head dimensions, the last one dense. The others are contiguous and summed over what their own shapes leave out:
// attn_mask anything that broadcasts to (..., heads, q_len, kv_len); sinks and alibi_slopes (heads,) or (batch, heads).
struct AttentionGradients {
  OptionalTensor query, key, value, attn_mask, sinks, alibi_slopes;
  std::array<const OptionalTensor*, 6> all() const { return {&query, &key, &value, &attn_mask, &sinks, &alibi_slopes}; }
};

// Directions of derivatives: of the shape and dtype of what they belong to, nullopt for zero.
struct AttentionTangents {
  OptionalTensor query, key, value, attn_mask, sinks, alibi_slopes;
  OptionalTensor grad_out, grad_lse;
  OptionalTensor out, lse;  // what the jvp writes and that of the backward reads
};

// A call of attention_weights: the weights of chosen rows and heads, whose numbers are for the device to check. Without
// stats they are exp(score - lse), with the rounding of lse.
struct WeightsCall {
  AttentionCall& call;   // its value is its key
  Tensor lse;            // (..., heads, q_len), dense
  OptionalTensor stats;  // (..., heads, q_len, 2), dense
  Tensor rows, heads;    // (n,) int64
};

// What a device supplies; the derivatives of the two, and weights, may be missing. The call is the device's to
// complete: dropout's seed, and strides of rows. out (..., q_len, v_head_dim) may have any strides with dense rows.
struct AttentionBackend {
  void (*forward)(AttentionCall&, const AttentionResults&) = nullptr;
  void (*backward)(AttentionCall&, const AttentionSaved&, const AttentionGradients&) = nullptr;
  // the derivative of forward in the direction of `tangents`, into tangents.out and tangents.lse
  void (*jvp)(AttentionCall&, const AttentionResults&, const AttentionTangents&) = nullptr;
  // the derivative of backward, where tangents.out and tangents.lse are those that jvp gives
  void (*backward_jvp)(AttentionCall&, const AttentionSaved&, const AttentionTangents&,
                       const AttentionGradients&) = nullptr;
  void (*weights)(const WeightsCall&, const Tensor& out) = nullptr;  // out: dense, (..., heads, rows, kv_len)
};

}  // namespace attnjourney
