// The kernels of token-sparse attention of one ISA, which have a source file of their own.
#pragma once
#include "backward.h"

namespace attnjourney {
namespace {

template <class T>
constexpr SparseKernels sparse_kernels() {
  using B = SparseBackward<T>;
  return {.lanes = B::width,
          .saved_space = B::saved_space,
          .rows_space = B::rows_space,
          .rows = B::rows,
          .add_keys = B::add_keys,
          .write = B::write};
}

constexpr SparseTable make_sparse_table() {
  return {gather_rows,
          {sparse_kernels<double>(), sparse_kernels<float>(), sparse_kernels<bf16>(), sparse_kernels<f16>()}};
}

}  // namespace
}  // namespace attnjourney
