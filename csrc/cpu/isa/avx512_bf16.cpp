// AVX-512 with products of bfloat16 pairs.
#include "bf16_table.h"

namespace attnjourney {
constinit const PairKernels avx512_bf16_pairs = pair_kernels<PairProducts>("avx512_bf16");
}
