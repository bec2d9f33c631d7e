// The CPU's linear attention: LinearBackend and GatedBackend.
#pragma once
#include "linear/gated_linear_attention.h"
#include "linear/linear_attention.h"

namespace attnjourney {

void cpu_linear_forward(const LinearCall&, const LinearInputs&, const Tensor& out, const Tensor& denominator,
                        const Tensor& state, const Tensor& normalizer);
void cpu_linear_backward(const LinearCall&, const LinearInputs&, const LinearGradientInputs&, const LinearGradients&);

void cpu_gated_forward(const GatedCall&, const GatedInputs&, const Tensor& out, const Tensor& state);
void cpu_gated_backward(const GatedCall&, const GatedInputs&, const Tensor& grad_out, const OptionalTensor& grad_state,
                        const GatedGradients&);

}  // namespace attnjourney
