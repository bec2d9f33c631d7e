// AVX-512 with products of bfloat16 pairs and a matrix unit (AMX-BF16).
#include "amx_unit.h"
#include "bf16_table.h"

// what follows is compiled for these
#include "cpu/kernels/attention/matrix_products.h"

namespace attnjourney {
constinit const PairKernels amx_pairs = pair_kernels<MatrixProducts<MatrixUnit>>("amx");
}
