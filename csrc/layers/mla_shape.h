// The sizes of one mla call, and its buffers of rows (batch * seq, ...) seen as heads (batch, heads, seq, ...) in
// place: a head is [nope | rope] in query and key, [nope | v] in kv; a row of kv_a is [latent | shared rotary key].
#pragma once
#include "layers.h"
#include "mla.h"

namespace attnjourney {

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

// Throws with the name of the argument that is wrong.
MlaShape check_mla(const MlaInputs& in);

AttentionOptions mla_attention_options(const MlaInputs& in);

// x (batch, heads or 1, seq, rope) turns in place
inline void mla_rotate(const MlaBackend& backend, const MlaInputs& in, const Tensor& x, RotaryDirection direction) {
  if (in.cos && x.size(3) > 0) backend.rotary(x, *in.cos, *in.sin, RotaryLayout::interleaved, direction, std::nullopt);
}

// The key (batch * seq, heads * (nope + rope)). The one copy of the layer: attention wants a head's key in one piece,
// and its rope part lies once for all heads.
Tensor mla_assemble_key(const MlaShape& s, const Tensor& kv, const Tensor& kv_a);

}  // namespace attnjourney
