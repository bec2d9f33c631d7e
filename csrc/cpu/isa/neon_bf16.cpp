// AArch64 with products of bfloat16 pairs.
#include "pairs_neon_bf16.h"
#include "tuning_neon.h"

// what follows is compiled for these
#include "pair_kernels.h"

namespace attnjourney {
constinit const PairKernels neon_bf16_pairs = pair_kernels();
constinit const PairForward neon_bf16_forward = pair_forward("neon_bf16");
}  // namespace attnjourney
