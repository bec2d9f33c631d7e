// What is built of the indexer: by head dimension for 16-bit numbers in whole chunks, and one size for all others.
#pragma once
#include "cuda/kernels/decode/latent_size.cuh"
#include "forward.cuh"
#include "indexer_columns.cuh"
#include "indexer_gradients.cuh"
#include "topk.cuh"

namespace attnjourney {

// D: columns of the indexer, 64 or 128. Four rows of query a block, or one where there are fewer or many heads.
template <class T, int D>
struct IndexerSizes {
  using Topk = TopkMma<T, D, 4, 8>;
  using TopkOne = TopkMma<T, D, 1, 4>;
  using Scores = IndexerColumns<SparseMma<T, 8>, D, 16, 64, false>;
  using QueryGradient = IndexerQueryGradient<SparseMma<T, 8>, D, 16, 64>;
  using KeyGradient = IndexerKeyGradient<SparseMma<T, 8>, D, 16, 64>;
};
template <class T>
struct IndexerFmaSizes {
  using Math = SparseFma<T>;
  static constexpr int kSize = Math::kSize;
  using Topk = TopkFma<T>;
  using TopkOne = Topk;
  using Scores = IndexerColumns<Math, 256, kSize, kSize, false>;
  using QueryGradient = IndexerQueryGradient<Math, 256, kSize, kSize>;
  using KeyGradient = IndexerKeyGradient<Math, 256, kSize, kSize>;
};
// Of the attention that the indexer predicts. D: 128, 256 or latents' 576 columns.
template <class T, int D>
struct IndexerTargets {
  using Stats = SparseForward<SparseMma<T, 4>, D, 64, 16, 32, false, false>;
  using Target = IndexerColumns<SparseMma<T, 8>, D, 16, D == kLatentDim ? 32 : 64, true>;
};
template <class T>
struct IndexerFmaTargets {
  using Math = SparseFma<T>;
  static constexpr int kSize = Math::kSize;
  using Stats = SparseForward<Math, kLatentDim, 64, kSize, kSize, false, false>;
  using Target = IndexerColumns<Math, kLatentDim, kSize, kSize, true>;
};

}  // namespace attnjourney
