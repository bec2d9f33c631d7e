// AVX-512 with products of bfloat16 pairs: what they change in the table of AVX-512.
#include "row_products_bf16.h"
#include "tuning_avx512.h"

// what follows is compiled for these
#include "cpu/dispatch.h"
#include "cpu/kernels/attention/forward.h"
#include "cpu/kernels/attention/jvp_pairs.h"
#include "cpu/kernels/attention/pair_products.h"
#include "cpu/kernels/decode/decode.h"
#include "cpu/kernels/linear/pair_products.h"
#include "cpu/kernels/linear/table.h"

namespace attnjourney {
namespace {

// The table itself is put together by dispatch.cpp: nothing here may run when the library is loaded.
constexpr PairKernels pair_kernels() {
  using D = Decode<bf16, RowPairProducts>;
  return {
      .jvp_space = PairJvp::space,
      .jvp = PairJvp::run,
      .decode_space = D::space,
      .decode_partial_size = D::partial_size,
      .decode_chunk = D::chunk,
      .decode_merge = D::merge,
      .linear = linear_kernels<bf16, ChunkPairProducts>(),
  };
}
using F = Forward<bf16, PairProducts>;

}  // namespace

constinit const PairKernels avx512_bf16_pairs = pair_kernels();
constinit const PairForward avx512_bf16_forward = {F::space, F::run};
}  // namespace attnjourney
