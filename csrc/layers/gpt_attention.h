// Causal self-attention as one layer: x -> packed projection -> attention -> output projection.
#pragma once
#include <tuple>

#include "attention/attention.h"

namespace attnjourney {

// x (batch, seq, embed), qkv_weight (3 * embed, embed), qkv_bias (3 * embed,), out_weight (embed, embed), out_bias
// (embed,)
// -> out, attn (batch, seq, embed): the heads before the output projection, lse (batch, heads, seq),
//    qkv (batch, seq, 3 * embed)
std::tuple<Tensor, Tensor, Tensor, Tensor> gpt_attention_forward(const AttentionBackend& backend, const Tensor& x,
                                                                 int64_t num_heads, const Tensor& qkv_weight,
                                                                 OptionalTensor qkv_bias, const Tensor& out_weight,
                                                                 OptionalTensor out_bias, double dropout_p,
                                                                 OptionalTensor dropout_seed);

// -> the gradients of x, qkv_weight, qkv_bias, out_weight, out_bias; `need` has one bit for each, in this order
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gpt_attention_backward(
    const AttentionBackend& backend, const Tensor& grad_out, const Tensor& x, int64_t num_heads,
    const Tensor& qkv_weight, const Tensor& out_weight, const Tensor& attn, const Tensor& lse, const Tensor& qkv,
    double dropout_p, OptionalTensor dropout_seed, int64_t need);

}  // namespace attnjourney
