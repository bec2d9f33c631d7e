// The kernels of linear attention for one dtype. Products: those of the backward.
#pragma once
#include "backward.h"
#include "cpu/dispatch.h"

namespace attnjourney {
namespace {

template <class Real, auto F>
void linear_sum(const LinearParams& p, const LinearHead& h, int64_t first, int64_t count, void* block, void* space) {
  F(p, h, first, count, static_cast<Real*>(block), space);
}
template <class Real, auto F>
void linear_sweep(const LinearParams& p, const LinearHead& h, int64_t first, int64_t count, void* running, void* also,
                  void* space) {
  F(p, h, first, count, static_cast<Real*>(running), static_cast<Real*>(also), space);
}

template <class T, class Products = ChunkProducts>
constexpr LinearKernels linear_kernels() {
  using Real = Compute<T>;
  using F = LinearForward<T>;
  using B = LinearBackward<T, Products>;
  return {
      .chunk = F::chunk,
      .lanes = Vec<Real>::width,
      .space = [](const LinearParams& params) { return max_of(F::space(params), B::space(params)); },
      .sum_keys = linear_sum<Real, F::sum_keys>,
      .forward = linear_sweep<Real, F::run>,
      .sum_keys_transposed = linear_sum<Real, B::sum_keys>,
      .backward_query = linear_sweep<Real, B::query_sweep>,
      .sum_queries = linear_sum<Real, B::sum_queries>,
      .backward_key = linear_sweep<Real, B::key_sweep>,
  };
}

}  // namespace
}  // namespace attnjourney
