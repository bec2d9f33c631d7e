// Attention on a matrix unit (AMX-BF16).
#include "amx_unit.h"
#include "pairs_avx512_bf16.h"
#include "tuning_amx.h"

// what follows is compiled for these
#include "cpu/dispatch.h"
#include "cpu/kernels/attention/forward.h"
#include "cpu/kernels/attention/matrix_backward.h"
#include "cpu/kernels/attention/matrix_products.h"
#include "cpu/kernels/attention/matrix_weights.h"
#include "cpu/kernels/decode/matrix_decode.h"
#include "cpu/kernels/decode/next_line.h"

namespace attnjourney {
namespace {
template <class T>
constexpr MatrixKernels matrix_kernels() {
  using F = Forward<T, MatrixProducts<T, MatrixUnit>>;
  using B = MatrixBackward<T, MatrixUnit>;
  using W = MatrixWeights<T, MatrixUnit>;
  return {.backward_key_block = B::key_block,
          .forward_space = F::space,
          .forward = F::run,
          .backward_space = B::space,
          .backward = B::run,
          .weights_space = W::space,
          .weights = W::run};
}
template <class Stored>
constexpr MatrixDecodeKernels matrix_decode() {
  using D = MatrixDecode<Stored, MatrixUnit>;
  return {D::takes, D::space, D::chunk};
}
}  // namespace
constinit const MatrixKernels amx_matrix[dtype_count] = {
    {}, matrix_kernels<float>(), matrix_kernels<bf16>(), matrix_kernels<f16>()};
constinit const MatrixDecodeKernels amx_decode[1 + byte_dtype_count] = {matrix_decode<bf16>(), matrix_decode<i8>(),
                                                                        matrix_decode<e4m3>()};
}  // namespace attnjourney
