// Decoding of multi-head latent attention in the latent space (DeepSeek-V2, arXiv 2405.04434): the operator
// `mla_decode` over a cache that holds, for each token, its normed latent c and one rotary key for all heads.
//
//   scores = (q_nope W_UK . c + q_rope . k_rope) * scale,  u = softmax(scores) c,  out = u W_UV^T
//
// which is attention with one key/value head whose value is the front of its key: `decode` does it. Many query rows
// cost less in the expanded form, attention over [c W_UK^T, k_rope] and c W_UV^T, made for a few heads at a time.
#pragma once
#include "decode.h"

namespace attnjourney {

struct Backend;

// out (batch, heads, q_len, v), lse (batch, heads, q_len)
std::tuple<Tensor, Tensor> mla_decode(const Backend&, Arguments&);

}  // namespace attnjourney
