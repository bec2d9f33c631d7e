// The kernels of fp16x2_forward.cpp, and their instances.
#pragma once
#include "cuda/kernels/fp32/fp16x2_planes.cuh"
#include "cuda/kernels/sm90/fp16x2_forward.cuh"
#ifndef ALONE
#include "cuda/kernels/fp32/forward.cuh"
#endif

namespace attnjourney {
INSTANCE(fp16x2_planes<DIM>);
INSTANCE(sm90_fp16x2_forward<DIM>);
#ifndef ALONE
using Fallback = Fp32ForwardOf<float, DIM>;
INSTANCE(fp32_forward_fallback<Fallback>);
#endif
}  // namespace attnjourney
