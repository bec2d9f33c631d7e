// Grouped-query attention as one layer (Ainslie et al. 2023, arXiv 2305.13245): projections, rotation, attention,
// output projection. num_kv_heads = num_heads is multi-head, 1 is multi-query attention (Shazeer 2019, arXiv
// 1911.02150).
#pragma once
#include "core/arguments.h"

namespace attnjourney {

struct Backend;

// -> out (batch, seq, out_embed), and what the backward reads (GqaSaved in gqa.cpp)
std::vector<Tensor> gqa_forward(const Backend&, Arguments&);

// -> the gradients of x, q_weight, k_weight, v_weight, o_weight, q_bias, k_bias, v_bias, o_bias; `need` has one bit for
//    each, in this order
std::vector<Tensor> gqa_backward(const Backend&, Arguments&);

}  // namespace attnjourney
