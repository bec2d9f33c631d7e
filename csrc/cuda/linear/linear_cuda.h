// CUDA's linear attention: LinearBackend, GatedBackend.
#pragma once
#include "linear/gated_linear_attention.h"
#include "linear/linear_attention.h"

namespace attnjourney {

void cuda_linear_forward(const LinearCall&, const LinearInputs&, const Tensor& out, const Tensor& denominator,
                         const Tensor& state, const Tensor& normalizer);
void cuda_linear_backward(const LinearCall&, const LinearInputs&, const LinearGradientInputs&, const LinearGradients&);
void cuda_gated_forward(const GatedCall&, const GatedInputs&, const Tensor& out, const Tensor& state);
void cuda_gated_backward(const GatedCall&, const GatedInputs&, const Tensor& grad_out, const OptionalTensor& grad_state,
                         const GatedGradients&);

}  // namespace attnjourney
