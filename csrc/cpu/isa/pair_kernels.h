// What products of bfloat16 pairs change in a table. An ISA's source file includes its Vec with Pairs and its Tuning
// before this.
#pragma once
#include "cpu/dispatch.h"
#include "cpu/kernels/attention/forward.h"
#include "cpu/kernels/attention/jvp_pairs.h"
#include "cpu/kernels/attention/pair_products.h"
#include "cpu/kernels/decode/decode.h"
#include "cpu/kernels/linear/pair_products.h"
#include "cpu/kernels/linear/table.h"
#include "cpu/kernels/shared.h"
#include "row_products_bf16.h"

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
constexpr PairForward pair_forward(const char* isa) {
  using F = Forward<bf16, PairProducts>;
  return {isa, F::space, F::run};
}

}  // namespace
}  // namespace attnjourney
