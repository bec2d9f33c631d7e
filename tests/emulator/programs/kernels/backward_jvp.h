// The kernels of backward_jvp.cpp, and their instances.
#pragma once
#include "cuda/kernels/common/backward_heads.cuh"
#include "cuda/kernels/common/backward_jvp_mask.cuh"
#include "cuda/kernels/common/backward_jvp_passes.cuh"
#include "cuda/kernels/fp32/backward_jvp.cuh"
#include "cuda/kernels/sm80/backward_jvp.cuh"

namespace attnjourney {
using Math = MATH;
using Kernel = BackwardJvp<Math>;
using MaskKernel = BackwardJvpMask<Math>;
using T = Kernel::T;
using Real = Kernel::Real;
INSTANCE(backward_jvp_prepare<T, Real>);
INSTANCE(backward_jvp<Kernel>);
INSTANCE(backward_jvp_mask<MaskKernel>);
INSTANCE(backward_per_head<true, Real>);
INSTANCE(backward_per_head<false, Real>);
}  // namespace attnjourney
