// The kernel table of one ISA. An ISA's source file includes its Vec, states its Tuning and then includes this.
#pragma once
#include "cpu/dispatch.h"
#include "cpu/kernels/attention/backward.h"
#include "cpu/kernels/attention/backward_jvp.h"
#include "cpu/kernels/attention/forward.h"
#include "cpu/kernels/attention/jvp.h"
#include "cpu/kernels/attention/plain_products.h"
#include "cpu/kernels/attention/weights.h"
#include "cpu/kernels/decode/decode.h"
#include "cpu/kernels/decode/head_product.h"
#include "cpu/kernels/decode/next_line.h"
#include "cpu/kernels/decode/quantized_rows.h"
#include "cpu/kernels/linear/table.h"
#include "cpu/kernels/shared.h"

ATTN_SHARED()

namespace attnjourney {
namespace {

template <class T>
constexpr AttentionKernels attention_kernels() {
  using Real = Compute<T>;
  using F = Forward<T, PlainProducts<T>>;
  using B = Backward<Real>;
  return {
      .forward_tile = F::tile,
      .forward_tiles = F::tiles,
      .forward_key_block = F::key_block,
      .backward_tile = B::tile,
      .backward_key_block = B::key_block,
      .forward_space = F::space,
      .forward = [](const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t count,
                    void* space) { F::run(params, head, first, count, space); },
      .backward_space = B::space,
      .backward = [](const AttentionParams& params, const HeadPointers* heads, const HeadGradients* gradients,
                     int64_t part, int64_t parts, void* partial,
                     void* space) { B::template run<T>({params, heads, gradients, part, parts, partial}, space); },
      .sum_parts = sum_parts<T>,
      .weights_space = Weights<Real>::space,
      .weights = Weights<Real>::template run<T>,
      .jvp_space = Jvp<Real>::space,
      .jvp = Jvp<Real>::template run<T>,
      .backward_jvp_space = BackwardJvp<Real>::space,
      .backward_jvp =
          [](const AttentionParams& params, const HeadPointers* heads, const HeadTangents* tangents,
             const HeadGradients* gradients, int64_t part, int64_t parts, void* partial, void* space) {
            BackwardJvp<Real>::template run<T>({params, heads, gradients, part, parts, partial}, tangents, space);
          },
  };
}

// numbers in e4m3, the output in T
template <class T>
constexpr AttentionKernels fp8_kernels() {
  using F = Forward<T, PlainProducts<e4m3>, e4m3>;
  AttentionKernels kernels{};
  kernels.forward_tile = F::tile, kernels.forward_key_block = F::key_block, kernels.forward_tiles = F::tiles;
  kernels.forward_space = F::space;
  kernels.forward = [](const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t count,
                       void* space) { F::run(params, head, first, count, space); };
  return kernels;
}

template <class T, class Stored = T>
constexpr DecodeKernels decode_kernels() {
  using D = Decode<T, NoPairs, Stored>;
  return {.few_rows = D::few_rows,
          .space = D::space,
          .partial_size = Decode<T>::partial_size,  // partial results know no keys
          .chunk = D::chunk,
          .merge = Decode<T>::merge,
          .product_space = HeadProduct<T>::space,
          .product = HeadProduct<T>::run};
}

template <class T, class Stored>
constexpr QuantizedKernels quantized_kernels() {
  using Rows = QuantizedRows<T, Stored>;
  return {.decode = decode_kernels<T, Stored>(), .quantize = Rows::quantize, .dequantize = Rows::dequantize};
}

constexpr KernelTable make_table(const char* isa, const GatedTable& gated, const SparseTable& sparse) {
  return {
      isa,
      {attention_kernels<double>(), attention_kernels<float>(), attention_kernels<bf16>(), attention_kernels<f16>()},
      {fp8_kernels<float>(), fp8_kernels<bf16>(), fp8_kernels<f16>()},
      {decode_kernels<double>(), decode_kernels<float>(), decode_kernels<bf16>(), decode_kernels<f16>()},
      {{quantized_kernels<float, i8>(), quantized_kernels<float, e4m3>()},
       {quantized_kernels<bf16, i8>(), quantized_kernels<bf16, e4m3>()},
       {quantized_kernels<f16, i8>(), quantized_kernels<f16, e4m3>()}},
      {linear_kernels<double>(), linear_kernels<float>(), linear_kernels<bf16>(), linear_kernels<f16>()},
      &gated,
      &sparse};
}

}  // namespace
}  // namespace attnjourney
