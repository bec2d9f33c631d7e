// The operators of attention over a device's backend, under each kind of mask: arguments, checks, allocation,
// broadcasting. Gradients and tangents of packed sequences and of masks of blocks are those of a call without a mask.
#pragma once
#include "attention.h"

namespace attnjourney {

struct Backend;

std::vector<Tensor> attention_forward(const Backend&, Arguments&, MaskArguments);
std::tuple<Tensor, Tensor> paged_attention(const Backend&, Arguments&);  // of packed rows over paged caches: out, lse
std::vector<Tensor> attention_backward(const Backend&, Arguments&, MaskArguments);
std::tuple<Tensor, Tensor> attention_jvp(const Backend&, Arguments&, MaskArguments);
std::vector<Tensor> attention_backward_jvp(const Backend&, Arguments&, MaskArguments);
Tensor attention_weights(const Backend&, Arguments&, MaskArguments);

}  // namespace attnjourney
