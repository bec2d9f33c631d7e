// The kernels of fp32_backward.cpp, and their instances.
#pragma once
#include "cuda/kernels/common/backward_heads.cuh"
#include "cuda/kernels/common/mask_gradient.cuh"
#include "cuda/kernels/fp32/backward.cuh"
#include "cuda/kernels/fp32/mask_gradient.cuh"
#include "cuda/kernels/fp32/passes.cuh"

using namespace attnjourney;
using Kernel = KERNEL;
using Real = Kernel::Real;

namespace attnjourney {
INSTANCE(fp32_prepare<Real>);
INSTANCE(fp32_backward<Kernel>);
INSTANCE(fp32_query<Real>);
INSTANCE(mask_gradient<Fp32MaskGradient<Real>, Real>);
INSTANCE(backward_per_head<true, Real>);
INSTANCE(backward_per_head<false, Real>);
}  // namespace attnjourney
