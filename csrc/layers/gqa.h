// Grouped-query attention as one layer (Ainslie et al. 2023, arXiv 2305.13245): projections, rotation, attention,
// output projection. num_kv_heads = num_heads is multi-head, 1 is multi-query attention (Shazeer 2019, arXiv
// 1911.02150). The operators `gqa_forward` and `gqa_backward`, their legal inputs, and what a device must supply.
#pragma once
#include <cstdint>
#include <optional>

#include "attention/attention.h"
#include "rotary.h"

namespace attnjourney {

struct GqaInputs {
  Tensor x;                 // (batch, seq, embed)
  int64_t heads, kv_heads;  // heads = group * kv_heads
  Tensor q_weight;          // (heads * head_dim, embed)
  Tensor k_weight;          // (kv_heads * head_dim, embed)
  Tensor v_weight;          // (kv_heads * v_head_dim, embed)
  Tensor o_weight;          // (out_embed, heads * v_head_dim)
  OptionalTensor q_bias, k_bias, v_bias, o_bias;
  OptionalTensor cos,
      sin;  // ([batch,] seq, rotary_dim / 2): the first rotary_dim numbers of a head turn, half-split layout
  bool is_causal;
};

// what the forward keeps for the backward
struct GqaSaved {
  Tensor query;  // (batch, seq, heads * head_dim), turned
  Tensor key;    // (batch, seq, kv_heads * head_dim), turned
  Tensor value;  // (batch, seq, kv_heads * v_head_dim)
  Tensor attn;   // (batch, seq, heads * v_head_dim), what the output projection reads
  Tensor lse;    // (batch, heads, seq)
};

struct GqaGradients {  // shape (0,) where none was asked for
  Tensor x, q_weight, k_weight, v_weight, o_weight, q_bias, k_bias, v_bias, o_bias;
};
// `need` has one bit for each, in this order; the four of the weights (q, k, v, o) and of the biases follow each other
constexpr int64_t gqa_need_x = 1, gqa_need_weight = 1 << 1, gqa_need_bias = 1 << 5;

struct GqaBackend {  // what a device supplies
  const AttentionBackend& attention;
  RotaryKernel rotary;
};

// (batch, seq, out_embed)
Tensor gqa_forward(const GqaBackend& backend, const GqaInputs& in, GqaSaved& saved);
GqaGradients gqa_backward(const GqaBackend& backend, const Tensor& grad_out, const GqaInputs& in, const GqaSaved& saved,
                          int64_t need);

}  // namespace attnjourney
