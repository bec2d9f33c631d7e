// Shared by the CPU's entry files of attention; the entries are those of AttentionBackend.
#pragma once
#include "attention/attention.h"
#include "head_walk.h"

namespace attnjourney {

Dropout dropout_of(const AttentionOptions&);

// zeros in the rows of `t` (..., heads, length, dim) that belong to no query
void clear_rows(const AttentionCall&, const Sequences&, const HeadWalk&, int64_t heads, const Tensor& t);

// zeros in those of `t`, with so many numbers a row as lse_at has them
void clear_numbers(const AttentionCall&, const Sequences&, const Tensor& t, int64_t numbers);

void cpu_attention_forward(AttentionCall&, const AttentionResults&);
void cpu_attention_backward(AttentionCall&, const AttentionSaved&, const AttentionGradients&);
void cpu_attention_jvp(AttentionCall&, const AttentionResults&, const AttentionTangents&);
void cpu_attention_backward_jvp(AttentionCall&, const AttentionSaved&, const AttentionTangents&,
                                const AttentionGradients&);
void cpu_attention_weights(const WeightsCall&, const Tensor& out);

}  // namespace attnjourney
