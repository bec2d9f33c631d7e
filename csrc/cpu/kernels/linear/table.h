// The kernels of linear attention for one dtype. Products: those of the backward.
#pragma once
#include "backward.h"
#include "cpu/dispatch.h"

namespace attnjourney {
namespace {

template <class C, auto F>
void linear_sum(const LinearParams& p, const LinearHead& h, int64_t first, int64_t count, void* block, void* space) {
  F(p, h, first, count, static_cast<C*>(block), static_cast<C*>(space));
}
template <class C, auto F>
void linear_sweep(const LinearParams& p, const LinearHead& h, int64_t first, int64_t count, void* running, void* also,
                  void* space) {
  F(p, h, first, count, static_cast<C*>(running), static_cast<C*>(also), static_cast<C*>(space));
}

template <class T, class Products = PlainProducts>
constexpr LinearKernels linear_kernels() {
  using C = Compute<T>;
  using F = LinearForward<T>;
  using B = LinearBackward<T, Products>;
  return {
      F::chunk,
      Vec<C>::width,
      [](const LinearParams& p) {
        return max_of(typename F::Space(p).total, typename B::Space(p).total) * int64_t(sizeof(C));
      },
      linear_sum<C, F::sum_keys>,
      linear_sweep<C, F::run>,
      linear_sum<C, B::sum_keys>,
      linear_sweep<C, B::query_sweep>,
      linear_sum<C, B::sum_queries>,
      linear_sweep<C, B::key_sweep>,
  };
}

}  // namespace
}  // namespace attnjourney
