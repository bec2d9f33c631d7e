// The kernel of fp8_forward.cpp, and its instance.
#pragma once
#include "cuda/kernels/sm90/fp8_forward.cuh"

namespace attnjourney {
INSTANCE(sm90_fp8_forward<SHAPE>);
}  // namespace attnjourney
