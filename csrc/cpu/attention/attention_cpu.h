// Shared by the CPU's entry files of attention; the entries are those of AttentionBackend.
#pragma once
#include "attention/attention.h"
#include "head_walk.h"

namespace attnjourney {

uint64_t seed_of(const AttentionOptions&);

// zeros in the rows of `t` (..., heads, length, dim) that belong to no query
void clear_rows(const AttentionCall&, const Sequences&, const HeadWalk&, int64_t heads, const Tensor& t);

void cpu_attention_forward(AttentionCall&, const AttentionResults&);
void cpu_attention_backward(AttentionCall&, const AttentionSaved&, const AttentionGradients&);
void cpu_attention_jvp(AttentionCall&, const AttentionResults&, const AttentionTangents&);
void cpu_attention_backward_jvp(AttentionCall&, const AttentionSaved&, const AttentionTangents&,
                                const AttentionGradients&);
void cpu_attention_weights(const WeightsCall&, const Tensor& out);

}  // namespace attnjourney
