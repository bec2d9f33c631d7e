// The kernel table of one ISA. An ISA's source file includes its Vec, states its Tuning and then includes this.
#pragma once
#include "cpu/dispatch.h"
#include "cpu/kernels/attention/backward.h"
#include "cpu/kernels/attention/backward_jvp.h"
#include "cpu/kernels/attention/forward.h"
#include "cpu/kernels/attention/jvp.h"
#include "cpu/kernels/attention/weights.h"
#include "cpu/kernels/decode/decode.h"
#include "cpu/kernels/decode/head_product.h"
#include "cpu/kernels/linear/table.h"

namespace attnjourney {
namespace {

template <class T>
constexpr AttentionKernels attention_kernels() {
  using C = Compute<T>;
  using F = Forward<C>;
  using B = Backward<C>;
  using P = Weights<C>;
  using J = Jvp<C>;
  using BJ = BackwardJvp<C>;
  return {
      F::tile,
      F::key_block,
      F::tiles,
      B::tile,
      B::key_block,
      [](const AttentionParams& p, int64_t rows) { return typename F::Space(p, rows).total * int64_t(sizeof(C)); },
      [](const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t rows, void* space) {
        F::template run<T>(p, h, first, rows, static_cast<C*>(space));
      },
      [](const AttentionParams& p) { return typename B::Space(p).total * int64_t(sizeof(C)); },
      [](const AttentionParams& p, const HeadPointers* heads, const HeadGradients* gradients, int64_t part,
         int64_t parts, void* partial,
         void* space) { B::template run<T>({p, heads, gradients, part, parts, partial}, static_cast<C*>(space)); },
      [](const AttentionParams& p, const void* partial, int64_t stride, int64_t parts, int64_t first, int64_t rows,
         const HeadGradients& g) { sum_parts<T>(p, partial, stride, parts, first, rows, g); },
      [](const AttentionParams& p) { return typename P::Space(p).total * int64_t(sizeof(C)); },
      [](const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t rows, void* space) {
        P::template run<T>(p, h, first, rows, static_cast<C*>(space));
      },
      [](const AttentionParams& p, int64_t rows) { return typename J::Space(p, rows).total * int64_t(sizeof(C)); },
      [](const AttentionParams& p, const HeadPointers& h, const HeadTangents& d, int64_t first, int64_t rows,
         void* space) { J::template run<T>(p, h, d, first, rows, static_cast<C*>(space)); },
      [](const AttentionParams& p) { return typename BJ::Space(p).total * int64_t(sizeof(C)); },
      [](const AttentionParams& p, const HeadPointers* heads, const HeadTangents* tangents,
         const HeadGradients* gradients, int64_t part, int64_t parts, void* partial, void* space) {
        BJ::template run<T>({p, heads, gradients, part, parts, partial}, tangents, static_cast<C*>(space));
      },
  };
}

template <class T>
constexpr DecodeKernels decode_kernels() {
  using D = Decode<T>;
  constexpr int64_t item = sizeof(Compute<T>);
  return {
      [](const DecodeParams& p, int64_t rows) { return D::space(p, rows) * item; },
      [](const DecodeParams& p, int64_t rows) { return D::partial_size(p, rows) * item; },
      D::chunk,
      D::merge,
      [](const HeadProductParams& p) { return HeadProduct<T>::space(p) * item; },
      HeadProduct<T>::run,
  };
}

constexpr KernelTable make_table(const char* isa) {
  return {
      isa,
      {attention_kernels<double>(), attention_kernels<float>(), attention_kernels<bf16>(), attention_kernels<f16>()},
      {decode_kernels<double>(), decode_kernels<float>(), decode_kernels<bf16>(), decode_kernels<f16>()},
      {linear_kernels<double>(), linear_kernels<float>(), linear_kernels<bf16>(), linear_kernels<f16>()}};
}

}  // namespace
}  // namespace attnjourney
