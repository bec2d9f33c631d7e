// Multi-head latent attention as one layer (DeepSeek-V2, arXiv 2405.04434; V3, arXiv 2412.19437): queries through a
// normed low-rank latent, keys and values through another one, and next to it one rotary key that all heads share.
#pragma once
#include "core/arguments.h"

namespace attnjourney {

struct Backend;

// -> out (batch, seq, out_embed), and what the backward reads (MlaSaved in mla_shape.h, in its order there)
std::vector<Tensor> mla_forward(const Backend&, Arguments&);

// -> the gradients of x, q_a_weight, q_a_norm_weight, q_b_weight, kv_a_weight, kv_a_norm_weight, kv_b_weight, o_weight;
//    `need` has one bit for each, in this order
std::vector<Tensor> mla_backward(const Backend&, Arguments&);

}  // namespace attnjourney
