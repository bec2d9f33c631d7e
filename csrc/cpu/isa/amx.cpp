// Attention on a matrix unit (AMX-BF16).
#include "amx_unit.h"
#include "pairs_avx512_bf16.h"
#include "tuning_amx.h"

// what follows is compiled for these
#include "cpu/kernels/decode/matrix_decode.h"
#include "cpu/kernels/decode/next_line.h"
#include "matrix_kernels.h"

namespace attnjourney {
namespace {
template <class Stored>
constexpr MatrixDecodeKernels matrix_decode() {
  using D = MatrixDecode<Stored, MatrixUnit>;
  return {D::takes, D::space, D::chunk};
}
}  // namespace
constinit const MatrixKernels amx_matrix[dtype_count] = {
    {}, matrix_kernels<float, MatrixUnit>(), matrix_kernels<bf16, MatrixUnit>(), matrix_kernels<f16, MatrixUnit>()};
constinit const MatrixDecodeKernels amx_decode[1 + byte_dtype_count] = {matrix_decode<bf16>(), matrix_decode<i8>(),
                                                                        matrix_decode<e4m3>()};
}  // namespace attnjourney
