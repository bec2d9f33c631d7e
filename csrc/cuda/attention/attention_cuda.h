// The CUDA entries of attention: AttentionBackend.
#pragma once
#include "attention/attention.h"

namespace attnjourney {

void cuda_attention_forward(AttentionCall&, const AttentionResults&);
void cuda_attention_backward(AttentionCall&, const AttentionSaved&, const AttentionGradients&);
void cuda_attention_jvp(AttentionCall&, const AttentionResults&, const AttentionTangents&);
void cuda_attention_backward_jvp(AttentionCall&, const AttentionSaved&, const AttentionTangents&,
                                 const AttentionGradients&);
template <class Real>                                                  // float, or double for float64
void paged_forward(const AttentionCall&, const AttentionResults&);     // beside a block_table: paged.cu
void cuda_fp8_forward(const AttentionCall&, const AttentionResults&);  // numbers in e4m3: fp8.cu
void cuda_attention_weights(const WeightsCall&, const Tensor& out);

}  // namespace attnjourney
