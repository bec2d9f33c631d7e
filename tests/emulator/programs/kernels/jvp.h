// The kernel of jvp.cpp, and its instance.
#pragma once
#ifdef FP32
#include "cuda/kernels/fp32/jvp.cuh"
#define ENTRY fp32_jvp
#else
#include "cuda/kernels/sm80/jvp.cuh"
#define ENTRY sm80_jvp
#endif

namespace attnjourney {
INSTANCE(ENTRY<KERNEL>);
}  // namespace attnjourney
