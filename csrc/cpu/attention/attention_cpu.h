// Shared by the CPU's entry files of attention.
#pragma once
#include "attention/attention.h"
#include "head_walk.h"

namespace attnjourney {

uint64_t seed_of(const AttentionOptions&);

// zeros in the rows of `t` (..., heads, length, dim) that belong to no query
void clear_rows(const AttentionCall&, const Sequences&, const HeadWalk&, int64_t heads, const Tensor& t);

// as AttentionBackend::backward
void attention_backward_cpu(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query,
                            const Tensor& key, const Tensor& value, const AttentionOptions&, const Tensor& out,
                            const Tensor& lse, AttentionGradients& gradients);
// as AttentionBackend::jvp
void attention_jvp_cpu(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions&,
                       const Tensor& out, const Tensor& lse, const AttentionTangents& tangents);
// as AttentionBackend::backward_jvp
void attention_backward_jvp_cpu(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query,
                                const Tensor& key, const Tensor& value, const AttentionOptions&, const Tensor& out,
                                const Tensor& lse, const AttentionTangents& tangents, AttentionGradients& gradients);

}  // namespace attnjourney
