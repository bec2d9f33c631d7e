// AVX-512 with products of bfloat16 pairs and a matrix unit (AMX-BF16).
#include "amx_unit.h"
#include "bf16_table.h"

namespace attnjourney {
constinit const PairKernels amx_pairs = pair_kernels("amx");
}
