// The layer of torch.nn.MultiheadAttention: input projections -> attention -> output projection, batch first.
#pragma once
#include "core/arguments.h"

namespace attnjourney {

struct Backend;

// query (batch, q_len, embed), key and value (batch, kv_len, embed); in_proj_weight (3 * embed, embed).
// key None: key is query. value None: value is key. Inputs that are one tensor are projected by one product.
// -> out (batch, q_len, embed), attn (batch, q_len, embed): the heads before the output projection,
//    lse (batch, heads, q_len), stats (batch, heads, q_len, 2), projected: one buffer with the projections of query,
//    key, value (see MhaCall)
std::vector<Tensor> mha_forward(const Backend&, Arguments&);

// -> the gradients of query, key, value, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias, attn_mask,
//    key_padding_mask; `need` has one bit for each, in this order. Where key or value was None, its gradient is part of
//    the gradient of the tensor it stood for, and its own bit is ignored.
std::vector<Tensor> mha_backward(const Backend&, Arguments&);

}  // namespace attnjourney
