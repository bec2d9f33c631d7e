// What is built of token-sparse attention: tiles by head dimension, for 16-bit numbers in whole chunks, and one size
// for all others. Latent: keys of up to 576 numbers whose first up to 512 are the values.
#pragma once
#include "cuda/kernels/decode/latent_size.cuh"
#include "fma_tiles.cuh"
#include "forward.cuh"
#include "key_gradient.cuh"
#include "mma_tiles.cuh"
#include "query_gradient.cuh"

namespace attnjourney {

// few: 16 items in a tile, many: where there are more. Small: of latents, for 99 KB of shared memory.
template <class T, int D>
struct SparseSizes {
  static constexpr int kKeys = D == 64 ? 64 : 32, kMany = D == 256 ? 32 : 64;
  using FewForward = SparseForward<SparseMma<T, 4>, D, D, 16, kKeys, false>;
  using ManyForward = SparseForward<SparseMma<T, 8>, D, D, kMany, 32, false>;
  using FewQueryGradient = SparseQueryGradient<SparseMma<T, 4>, D, D, 16, kKeys, false>;
  using ManyQueryGradient = SparseQueryGradient<SparseMma<T, 8>, D, D, D == 256 ? 16 : 64, 32, false>;
  using KeyGradient = SparseKeyGradient<SparseMma<T, 8>, D, D, 16, D == 256 ? 32 : 64, false>;
};
template <class T, bool Small>
struct SparseLatentSizes {
  static constexpr int kD = kLatentDim, kDv = kLatentValueDim, kKeys = Small ? 16 : 32;
  using Forward = SparseForward<SparseMma<T, 8>, kD, kDv, Small ? 32 : 64, kKeys, true>;
  using QueryGradient = SparseQueryGradient<SparseMma<T, Small ? 4 : 8>, kD, kDv, Small ? 16 : 32, kKeys, true>;
  using KeyGradient = SparseKeyGradient<SparseMma<T, 8>, kD, kDv, 16, kKeys, true>;
};
template <class T, bool Latent>
struct SparseFmaSizes {
  using Math = SparseFma<T>;
  static constexpr int kD = Latent ? kLatentDim : 256, kDv = Latent ? kLatentValueDim : 256, kSize = Math::kSize;
  using Forward = SparseForward<Math, kD, kDv, kSize, kSize, Latent>;
  static constexpr int kRows = Latent ? kSize / 2 : kSize;  // of the gradients: 99 KB of shared memory
  using QueryGradient = SparseQueryGradient<Math, kD, kDv, kRows, kSize, Latent>;
  using KeyGradient = SparseKeyGradient<Math, kD, kDv, kRows, kSize, Latent>;
};

}  // namespace attnjourney
