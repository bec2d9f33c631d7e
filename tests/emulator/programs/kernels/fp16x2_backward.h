// The kernels of fp16x2_backward.cpp, and their instances.
#pragma once
#include "cuda/kernels/fp32/fp16x2_backward.cuh"
#include "cuda/kernels/fp32/fp16x2_backward_passes.cuh"
#ifndef ALONE
#include "cuda/kernels/fp32/backward.cuh"
#endif

using namespace attnjourney;
#ifdef SMALL
using Kernel = Fp16x2BackwardSmall;
#else
using Kernel = Fp16x2BackwardOf<DIM>;
#endif

namespace attnjourney {
INSTANCE(fp32_prepare<float>);
INSTANCE(fp16x2_backward_planes<DIM>);
INSTANCE(fp16x2_backward<Kernel>);
INSTANCE(fp16x2_query<Kernel>);
#ifndef ALONE
using Fallback = Fp32BackwardOf<float, DIM>;
INSTANCE(fp32_backward_fallback<Fallback>);
#endif
}  // namespace attnjourney
