// The inputs and sizes of one mla call, and its buffers of rows (batch * seq, ...) seen as heads (batch, heads, seq,
// ...) in place: a head is [nope | rope] in query and key, [nope | v] in kv; a row of kv_a is [latent | shared rotary
// key].
#pragma once
#include <cstdint>
#include <optional>

#include "core/backend.h"
#include "layers.h"
#include "mla.h"

namespace attnjourney {

struct MlaInputs {
  Tensor x;                           // (batch, seq, embed)
  int64_t heads, nope, rope, v;       // per head: qk_nope_head_dim, qk_rope_head_dim, v_head_dim
  OptionalTensor q_a_weight;          // (q_lora, embed); without it q_b_weight reads x
  OptionalTensor q_a_norm_weight;     // (q_lora,)
  Tensor q_b_weight;                  // (heads * (nope + rope), q_lora or embed)
  Tensor kv_a_weight;                 // (kv_lora + rope, embed)
  Tensor kv_a_norm_weight;            // (kv_lora,)
  Tensor kv_b_weight;                 // (heads * (nope + v), kv_lora), a head's nope rows before its v rows
  Tensor o_weight;                    // (out_embed, heads * v)
  OptionalTensor cos = {}, sin = {};  // ([batch,] seq, rope / 2), interleaved layout
  bool is_causal = true;
  std::optional<double> scale = {};  // default (nope + rope)^-0.5
  double eps = 0;                    // the backward has it in rstd
};

// what the forward keeps for the backward; the normed latents and the assembled key are recomputed
struct MlaSaved {
  Tensor query;    // (batch, seq, heads * (nope + rope)), its rope part turned
  Tensor kv;       // (batch, seq, heads * (nope + v))
  Tensor kv_a;     // (batch, seq, kv_lora + rope): the latent before its norm, and the shared rotary key, turned
  Tensor kv_rstd;  // (batch, seq)
  Tensor q_a;      // (batch, seq, q_lora): the latent before its norm; (0,) without q_a_weight
  Tensor q_rstd;   // (batch, seq); (0,) without q_a_weight
  Tensor attn;     // (batch, seq, heads * v), what the output projection reads
  Tensor lse;      // (batch, heads, seq)
  Tensor stats;    // lse.shape + (2,): see HeadPointers
};

// bits of `need`
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

struct MlaShape {
  int64_t batch, seq, rows, embed, heads, nope, rope, qk, v, q_lora, kv_lora, out_embed;

  Tensor heads_of(const Tensor& rows, int64_t dim) const { return layer::split_heads(rows, batch, seq, heads, dim); }
  Tensor key_nope(const Tensor& key) const { return layer::split_heads(key, batch, seq, heads, nope, 0, qk); }
  Tensor rope_of(const Tensor& query_or_key) const {
    return layer::split_heads(query_or_key, batch, seq, heads, rope, nope, qk);
  }
  Tensor kv_nope(const Tensor& kv) const { return layer::split_heads(kv, batch, seq, heads, nope, 0, nope + v); }
  Tensor value_of(const Tensor& kv) const { return layer::split_heads(kv, batch, seq, heads, v, nope, nope + v); }
  Tensor latent_of(const Tensor& kv_a) const { return layer::columns(kv_a, 0, kv_lora); }
  // (batch, 1, seq, rope), or the same for every head
  Tensor shared_key(const Tensor& kv_a) const { return layer::split_heads(kv_a, batch, seq, 1, rope, kv_lora); }
  Tensor repeated_key(const Tensor& kv_a) const {
    return layer::split_heads(kv_a, batch, seq, heads, rope, kv_lora, 0);
  }
};

MlaInputs read_mla_inputs(Arguments& arguments);             // up to o_weight
void read_mla_options(Arguments& arguments, MlaInputs& in);  // but for eps

// Throws with the name of the argument that is wrong.
MlaShape check_mla(const MlaInputs& in);

AttentionArgs mla_attention_args(const MlaInputs& in, const MlaShape& s, const Tensor& query, const Tensor& key,
                                 const Tensor& kv);

// x (batch, heads or 1, seq, rope) turns in place
inline void mla_rotate(const Backend& backend, const MlaInputs& in, const Tensor& x, RotaryDirection direction) {
  if (in.cos && x.size(3) > 0) backend.rotary(x, *in.cos, *in.sin, RotaryLayout::interleaved, direction, std::nullopt);
}

// The key (batch * seq, heads * (nope + rope)). The one copy of the layer: attention wants a head's key in one piece,
// and its rope part lies once for all heads.
Tensor mla_assemble_key(const MlaShape& s, const Tensor& kv, const Tensor& kv_a);

}  // namespace attnjourney
