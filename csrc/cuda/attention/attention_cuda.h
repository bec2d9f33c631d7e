// The parts of the CUDA entry of attention.
#pragma once
#include "attention/attention.h"

namespace attnjourney {

extern const AttentionBackend cuda_attention;  // attention.cu

}  // namespace attnjourney
