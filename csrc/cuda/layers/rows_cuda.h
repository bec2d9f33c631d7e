// The row kernels of CUDA as the layer operators take them.
#pragma once
#include "layers/rms_norm.h"
#include "layers/rotary.h"

namespace attnjourney {

void cuda_rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, RotaryLayout layout, RotaryDirection direction,
                 const OptionalTensor& from);  // rotary.cu
extern const RmsNormBackend cuda_rms_norm;     // rms_norm.cu

}  // namespace attnjourney
