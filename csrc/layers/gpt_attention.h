// Causal self-attention as one layer: x -> packed projection -> attention -> output projection.
#pragma once
#include "core/arguments.h"

namespace attnjourney {

struct Backend;

// x (batch, seq, embed), qkv_weight (3 * embed, embed), qkv_bias (3 * embed,), out_weight (embed, embed), out_bias
// (embed,)
// -> out, attn (batch, seq, embed): the heads before the output projection, lse (batch, heads, seq),
//    stats (batch, heads, seq, 2), qkv (batch, seq, 3 * embed)
std::vector<Tensor> gpt_attention_forward(const Backend&, Arguments&);

// -> the gradients of x, qkv_weight, qkv_bias, out_weight, out_bias; `need` has one bit for each, in this order
std::vector<Tensor> gpt_attention_backward(const Backend&, Arguments&);

}  // namespace attnjourney
