// Attention of float16 on a matrix unit that multiplies float16 numbers (AMX-FP16); all else as on AMX-BF16.
#include "amx_unit.h"
#include "pairs_avx512_bf16.h"
#include "tuning_amx.h"

// what follows is compiled for these
#include "matrix_kernels.h"

namespace attnjourney {
constinit const MatrixKernels amx_fp16_matrix[dtype_count] = {{}, {}, {}, matrix_kernels<f16, MatrixUnitF16>()};
}  // namespace attnjourney
