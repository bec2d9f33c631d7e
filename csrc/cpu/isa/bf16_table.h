// The table of AVX-512 with another forward, jvp, decode and backward of linear attention in bfloat16. MatrixUnit is
// defined before this is included.
#pragma once
#include "row_products_bf16.h"
#include "tuning_avx512.h"

// what follows is compiled for these
#include "cpu/dispatch.h"
#include "cpu/kernels/attention/forward_pairs.h"
#include "cpu/kernels/attention/jvp_pairs.h"
#include "cpu/kernels/decode/decode.h"
#include "cpu/kernels/linear/pair_products.h"
#include "cpu/kernels/linear/table.h"

namespace attnjourney {
namespace {

KernelTable make_bf16_table(const char* isa) {
  KernelTable t = avx512_kernels;  // constant initialised, so it is there
  t.isa = isa;
  AttentionKernels& k = t.attention[static_cast<int>(DType::bf16)];
  k.forward_space = [](const AttentionParams& p, int64_t rows) { return ForwardDot::Space(p, rows).total; };
  k.forward = [](const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t rows, void* space) {
    ForwardDot::run(p, h, first, rows, static_cast<char*>(space));
  };
  k.jvp_space = [](const AttentionParams& p, int64_t rows) { return JvpDot::Space(p, rows).total; };
  k.jvp = [](const AttentionParams& p, const HeadPointers& h, const HeadTangents& d, int64_t first, int64_t rows,
             void* space) { JvpDot::run(p, h, d, first, rows, static_cast<char*>(space)); };
  using D = Decode<bf16, PairProducts>;
  DecodeKernels& d = t.decode[static_cast<int>(DType::bf16)];
  d.space = [](const DecodeParams& p, int64_t rows) { return D::space(p, rows) * int64_t(sizeof(float)); };
  d.partial_size = [](const DecodeParams& p, int64_t rows) {
    return D::partial_size(p, rows) * int64_t(sizeof(float));
  };
  d.chunk = D::chunk;
  d.merge = D::merge;
  t.linear[static_cast<int>(DType::bf16)] = linear_kernels<bf16, DotProducts>();
  return t;
}

}  // namespace
}  // namespace attnjourney
