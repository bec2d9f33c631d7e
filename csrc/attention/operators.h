// The operators attention_forward, attention_backward and their derivatives over a device's backend: allocation,
// broadcasting.
#pragma once
#include <tuple>

#include "attention.h"

namespace attnjourney {

std::tuple<Tensor, Tensor> attention_forward(const AttentionBackend& backend, const Tensor& query, const Tensor& key,
                                             const Tensor& value, const AttentionOptions& options);

// With tangents (out and lse among them): the derivative of the gradients in their direction.
// need: bit 0 query, 1 key, 2 value, 3 attn_mask, 4 sinks, 5 alibi_slopes. A gradient not needed has shape (0,).
using AttentionGradientTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
AttentionGradientTuple attention_backward(const AttentionBackend& backend, const Tensor& grad_out,
                                          const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
                                          const Tensor& value, const AttentionOptions& options, const Tensor& out,
                                          const Tensor& lse, int64_t need, const AttentionTangents* tangents = nullptr);

// the tangents of out and lse, which it allocates in place of tangents.out and tangents.lse
std::tuple<Tensor, Tensor> attention_jvp(const AttentionBackend& backend, const Tensor& query, const Tensor& key,
                                         const Tensor& value, const AttentionOptions& options, const Tensor& out,
                                         const Tensor& lse, AttentionTangents tangents);

}  // namespace attnjourney
