// What products of bfloat16 pairs change in the table of AVX-512. MatrixUnit is defined before this is included.
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

// The table itself is put together by dispatch.cpp: nothing here may run when the library is loaded.
constexpr PairKernels pair_kernels(const char* isa) {
  PairKernels k{};
  k.isa = isa;
  k.forward_space = [](const AttentionParams& p, int64_t rows) { return ForwardDot::Space(p, rows).total; };
  k.forward = [](const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t rows, void* space) {
    ForwardDot::run(p, h, first, rows, static_cast<char*>(space));
  };
  k.jvp_space = [](const AttentionParams& p, int64_t rows) { return JvpDot::Space(p, rows).total; };
  k.jvp = [](const AttentionParams& p, const HeadPointers& h, const HeadTangents& d, int64_t first, int64_t rows,
             void* space) { JvpDot::run(p, h, d, first, rows, static_cast<char*>(space)); };
  using D = Decode<bf16, PairProducts>;
  k.decode_space = [](const DecodeParams& p, int64_t rows) { return D::space(p, rows) * int64_t(sizeof(float)); };
  k.decode_partial_size = [](const DecodeParams& p, int64_t rows) {
    return D::partial_size(p, rows) * int64_t(sizeof(float));
  };
  k.decode_chunk = D::chunk;
  k.decode_merge = D::merge;
  k.linear = linear_kernels<bf16, DotProducts>();
  return k;
}

}  // namespace
}  // namespace attnjourney
