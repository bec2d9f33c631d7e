// The entries of a matrix unit. A source file includes its Vec, its unit and its Tuning and then this.
#pragma once
#include "cpu/dispatch.h"
#include "cpu/kernels/attention/forward.h"
#include "cpu/kernels/attention/matrix_backward.h"
#include "cpu/kernels/attention/matrix_products.h"
#include "cpu/kernels/attention/matrix_weights.h"

namespace attnjourney {
namespace {

template <class T, class Unit>
constexpr MatrixKernels matrix_kernels() {
  using F = Forward<T, MatrixProducts<T, Unit>>;
  using B = MatrixBackward<T, Unit>;
  using W = MatrixWeights<T, Unit>;
  return {.backward_key_block = B::key_block,
          .forward_space = F::space,
          .forward = F::run,
          .backward_space = B::space,
          .backward = B::run,
          .weights_space = W::space,
          .weights = W::run};
}

}  // namespace
}  // namespace attnjourney
