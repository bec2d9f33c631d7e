// The forward of bfloat16 on a matrix unit (AMX-BF16); all else where there is one is that of avx512_bf16.cpp.
#include "amx_unit.h"
#include "pairs_avx512_bf16.h"
#include "tuning_avx512.h"

// what follows is compiled for these
#include "cpu/dispatch.h"
#include "cpu/kernels/attention/forward.h"
#include "cpu/kernels/attention/matrix_products.h"

namespace attnjourney {
namespace {
using F = Forward<bf16, MatrixProducts<MatrixUnit>>;
}
constinit const PairForward amx_forward = {"amx", F::space, F::run};
}  // namespace attnjourney
