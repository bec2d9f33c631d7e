// The kernel of weights.cpp, and its instance.
#pragma once
#include "cuda/kernels/common/attention_weights.cuh"

namespace attnjourney {
INSTANCE(attention_weights<KERNEL>);
}  // namespace attnjourney
