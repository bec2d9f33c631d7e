// CUDA's row operations as the layers take them: RotaryFunction and RmsNormBackend.
#pragma once
#include "layers/rms_norm.h"
#include "layers/rotary.h"

namespace attnjourney {

void cuda_rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, RotaryLayout layout, RotaryDirection direction,
                 const OptionalTensor& from);
void cuda_rms_forward(const Tensor& x, const Tensor& weight, double eps, const Tensor& y, const Tensor& rstd);
void cuda_rms_apply(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& y);
void cuda_rms_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                       const OptionalTensor& grad_x, const OptionalTensor& grad_weight);

}  // namespace attnjourney
