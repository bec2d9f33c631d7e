// Multi-head latent attention as one layer (DeepSeek-V2, arXiv 2405.04434; V3, arXiv 2412.19437): queries through a
// normed low-rank latent, keys and values through another one, and beside it one rotary key that all heads share. The
// operators `mla_forward` and `mla_backward`, their legal inputs, and what a device must supply.
#pragma once
#include <cstdint>
#include <optional>

#include "attention/attention.h"
#include "rms_norm.h"
#include "rotary.h"

namespace attnjourney {

struct MlaInputs {
  Tensor x;                        // (batch, seq, embed)
  int64_t heads, nope, rope, v;    // per head: qk_nope_head_dim, qk_rope_head_dim, v_head_dim
  OptionalTensor q_a_weight;       // (q_lora, embed); without it q_b_weight reads x
  OptionalTensor q_a_norm_weight;  // (q_lora,)
  Tensor q_b_weight;               // (heads * (nope + rope), q_lora or embed)
  Tensor kv_a_weight;              // (kv_lora + rope, embed)
  Tensor kv_a_norm_weight;         // (kv_lora,)
  Tensor kv_b_weight;              // (heads * (nope + v), kv_lora), a head's nope rows before its v rows
  Tensor o_weight;                 // (out_embed, heads * v)
  OptionalTensor cos, sin;         // ([batch,] seq, rope / 2), interleaved layout
  bool is_causal;
  std::optional<double> scale;  // default (nope + rope)^-0.5
  double eps;
};

// what the forward keeps for the backward; the normed latents and the assembled key are made again
struct MlaSaved {
  Tensor query;    // (batch, seq, heads * (nope + rope)), its rope part turned
  Tensor kv;       // (batch, seq, heads * (nope + v))
  Tensor kv_a;     // (batch, seq, kv_lora + rope): the latent before its norm, and the shared rotary key, turned
  Tensor kv_rstd;  // (batch, seq)
  Tensor q_a;      // (batch, seq, q_lora): the latent before its norm; (0,) without q_a_weight
  Tensor q_rstd;   // (batch, seq); (0,) without q_a_weight
  Tensor attn;     // (batch, seq, heads * v), what the output projection reads
  Tensor lse;      // (batch, heads, seq)
};

struct MlaGradients {  // shape (0,) where none was asked for
  Tensor x, q_a_weight, q_a_norm_weight, q_b_weight, kv_a_weight, kv_a_norm_weight, kv_b_weight, o_weight;
};
// `need` has one bit for each, in this order
enum MlaNeed : int64_t {
  mla_need_x = 1,
  mla_need_q_a_weight = 2,
  mla_need_q_a_norm_weight = 4,
  mla_need_q_b_weight = 8,
  mla_need_kv_a_weight = 16,
  mla_need_kv_a_norm_weight = 32,
  mla_need_kv_b_weight = 64,
  mla_need_o_weight = 128,
};

struct MlaBackend {  // what a device supplies
  const AttentionBackend& attention;
  RotaryKernel rotary;
  const RmsNormBackend& rms_norm;
};

// (batch, seq, out_embed)
Tensor mla_forward(const MlaBackend& backend, const MlaInputs& in, MlaSaved& saved);
MlaGradients mla_backward(const MlaBackend& backend, const Tensor& grad_out, const MlaInputs& in, const MlaSaved& saved,
                          int64_t need);

}  // namespace attnjourney
