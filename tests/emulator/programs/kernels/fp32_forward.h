// The kernel of fp32_forward.cpp, and its instance.
#pragma once
#include "cuda/kernels/fp32/forward.cuh"

namespace attnjourney {
INSTANCE(fp32_forward<KERNEL>);
}  // namespace attnjourney
