// The kernel of wide_forward.cpp, and its instance.
#pragma once
#include "cuda/kernels/sm80/wide_forward.cuh"

namespace attnjourney {
INSTANCE(sm80_wide_forward<KERNEL>);
}  // namespace attnjourney
