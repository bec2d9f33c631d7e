// AVX-512 with products of bfloat16 pairs.
#include "pairs_avx512_bf16.h"
#include "tuning_avx512.h"

// what follows is compiled for these
#include "pair_kernels.h"

namespace attnjourney {
constinit const PairKernels avx512_bf16_pairs = pair_kernels();
constinit const PairForward avx512_bf16_forward = pair_forward("avx512_bf16");
}  // namespace attnjourney
