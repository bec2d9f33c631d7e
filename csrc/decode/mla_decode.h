// Decoding of multi-head latent attention in the latent space (DeepSeek-V2, arXiv 2405.04434): the operator
// `mla_decode` over a cache that holds, for each token, its normed latent c and one rotary key for all heads.
//
//   scores = (q_nope W_UK . c + q_rope . k_rope) * scale,  u = softmax(scores) c,  out = u W_UV^T
//
// which is attention with one key/value head whose value is the front of its key: `decode` does it. Many query rows
// cost less in the expanded form, attention over [c W_UK^T, k_rope] and c W_UV^T, made for a few heads at a time.
#pragma once
#include <limits>

#include "decode.h"

namespace attnjourney {

struct MlaDecodeInputs {
  Tensor query;         // (batch, heads, q_len, nope + rope)
  Tensor latent;        // (batch, capacity, kv_lora + rope); paged: (num_blocks, block_size, kv_lora + rope)
  Tensor lengths;       // (batch,) int64
  Tensor kv_b_weight;   // (heads * (nope + v), kv_lora), a head's nope rows (W_UK) before its v rows (W_UV)
  DecodeInputs decode;  // its block_table and options; the default scale is (nope + rope)^-0.5
};

// What a device supplies beside `decode`: out (batch, heads, q_len, m) = x (batch, heads, q_len, n) times each head's
// w (heads, n, m), transposed (heads, m, n); all with a dense last dimension.
using HeadProducts = void (*)(const Tensor& x, const Tensor& w, bool transposed, const Tensor& out);

struct MlaDecodeBackend {
  DecodeKernel latents, expanded;  // for one key/value head of latents; for expanded keys and values
  HeadProducts products;
  int64_t most_head_dim = std::numeric_limits<int64_t>::max();  // of expanded keys and values
};

// out (batch, heads, q_len, v), lse (batch, heads, q_len)
std::tuple<Tensor, Tensor> mla_decode(const MlaDecodeBackend& backend, const MlaDecodeInputs& in);

}  // namespace attnjourney
