// The layer of torch.nn.MultiheadAttention: input projections -> attention -> output projection, batch first.
#pragma once
#include <tuple>

#include "attention/attention.h"

namespace attnjourney {

// query (batch, q_len, embed), key and value (batch, kv_len, embed); in_proj_weight (3 * embed, embed).
// key None: key is query. value None: value is key. Inputs that are one tensor are projected by one product.
// -> out (batch, q_len, embed), attn (batch, q_len, embed): the heads before the output projection,
//    lse (batch, heads, q_len), projected: one buffer with the projections of query, key, value (see MhaCall)
std::tuple<Tensor, Tensor, Tensor, Tensor> mha_forward(const AttentionBackend& backend, const Tensor& query,
                                                       OptionalTensor key, OptionalTensor value, int64_t num_heads,
                                                       const Tensor& in_proj_weight, OptionalTensor in_proj_bias,
                                                       const Tensor& out_proj_weight, OptionalTensor out_proj_bias,
                                                       OptionalTensor attn_mask, OptionalTensor key_padding_mask,
                                                       bool is_causal, double dropout_p, OptionalTensor dropout_seed);

// -> the gradients of query, key, value, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias, attn_mask,
//    key_padding_mask; `need` has one bit for each, in this order. Where key or value was None, its gradient is part of
//    the gradient of the tensor it stood for, and its own bit is ignored.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> mha_backward(
    const AttentionBackend& backend, const Tensor& grad_out, const Tensor& query, OptionalTensor key,
    OptionalTensor value, int64_t num_heads, const Tensor& in_proj_weight, const Tensor& out_proj_weight,
    OptionalTensor attn_mask, OptionalTensor key_padding_mask, const Tensor& attn, const Tensor& lse,
    const Tensor& projected, bool is_causal, double dropout_p, OptionalTensor dropout_seed, int64_t need);

}  // namespace attnjourney
