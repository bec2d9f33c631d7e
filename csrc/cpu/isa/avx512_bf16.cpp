// AVX-512 with products of bfloat16 pairs.
#include "pairs_avx512_bf16.h"
#include "tuning_avx512.h"

// what follows is compiled for these
#include "cpu/kernels/attention/matrix_backward.h"
#include "cpu/kernels/common/pair_block.h"
#include "pair_kernels.h"

namespace attnjourney {
namespace {
using Backward = MatrixBackward<bf16, PairUnit>;
}
constinit const PairKernels avx512_bf16_pairs = pair_kernels();
constinit const PairForward avx512_bf16_forward = pair_forward("avx512_bf16");
constinit const MatrixKernels avx512_bf16_matrix[dtype_count] = {{},
                                                                 {},
                                                                 {.backward_key_block = Backward::key_block,
                                                                  .forward_space = nullptr,
                                                                  .forward = nullptr,
                                                                  .backward_space = Backward::space,
                                                                  .backward = Backward::run,
                                                                  .weights_space = nullptr,
                                                                  .weights = nullptr},
                                                                 {}};
}  // namespace attnjourney
