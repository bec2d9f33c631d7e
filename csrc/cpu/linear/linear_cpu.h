// The CPU's linear attention: LinearBackend.
#pragma once
#include "linear/linear_attention.h"

namespace attnjourney {

void cpu_linear_forward(const LinearCall&, const LinearInputs&, const Tensor& out, const Tensor& denominator,
                        const Tensor& state, const Tensor& normalizer);
void cpu_linear_backward(const LinearCall&, const LinearInputs&, const LinearGradientInputs&, const LinearGradients&);

}  // namespace attnjourney
