// The kernels of token-sparse attention of one ISA, which have a source file of their own.
#pragma once
#include "backward.h"
#include "indexer.h"
#include "indexer_loss.h"

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

template <class T>
constexpr IndexerKernels indexer_kernels() {
  using I = Indexer<T>;
  using L = IndexerLoss<T>;
  return {.key_block = I::block,
          .space = I::space,
          .load_rows = I::load_rows,
          .scores = I::scores,
          .filter = I::filter,
          .loss_space = L::space,
          .target = L::target,
          .index_scores = L::scores,
          .loss_rows = L::rows};
}

constexpr SparseTable make_sparse_table() {
  return {gather_rows,
          {sparse_kernels<double>(), sparse_kernels<float>(), sparse_kernels<bf16>(), sparse_kernels<f16>()},
          {indexer_kernels<double>(), indexer_kernels<float>(), indexer_kernels<bf16>(), indexer_kernels<f16>()}};
}

}  // namespace
}  // namespace attnjourney
