// Products of a warp's 16 rows with tiles of keys and values in shared memory, for 16-bit numbers on mma.sync. Tiles
// lie as sm80/forward.cuh has them: rows of D numbers in chunks of 16 bytes.
#pragma once
#include "cuda/kernels/common/scores.cuh"

namespace attnjourney {

// Columns: of D that a warp has of scores' products and of sums, from chunk `first` on. at: the lane, opaque where
// addresses would be held in registers that there are not.
template <class T, int D, int Keys, int Columns = D>
struct Sm80RowProducts {
  using Weights = float[Keys / 8][4];
  using Sums = float[Columns / 8][4];

  static __device__ __forceinline__ uint32_t chunk_at(uint32_t tile, int row, int chunk) {
    return tile + row * (D * 2) + ((chunk ^ (row & 7)) << 4);
  }

  // s += Q K^T; row0: this warp's first one
  static __device__ __forceinline__ void add_scores(Weights& s, uint32_t rows, uint32_t keys, int row0, int first,
                                                    int at) {
#pragma unroll 4
    for (int kk = 0; kk < Columns / 16; kk++) {
      uint32_t q[4];
      ptx::ldmatrix_x4(q, chunk_at(rows, row0 + at % 16, first + kk * 2 + at / 16));
#pragma unroll
      for (int j = 0; j < Keys / 16; j++) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, chunk_at(keys, j * 16 + at % 8 + at / 16 * 8, first + kk * 2 + at / 8 % 2));
        pair_mma<T>(s[2 * j], s[2 * j + 1], q, b);
      }
    }
  }

  // acc += S V of a tile; hides: it may hide some pairs, whose values then do not leak
  static __device__ __forceinline__ void add_values(Sums& acc, const Weights& s, uint32_t values, bool hides, int first,
                                                    int lane, int at) {
    const auto value_fragment = [&](uint32_t (&b)[4], int kk, int j, int at) {
      ptx::ldmatrix_x4_trans(b, chunk_at(values, kk * 16 + at % 16, first + j * 2 + at / 16));
    };
    const auto value_product = [&](auto&& product, int at) {
#pragma unroll
      for (int kk = 0; kk < Keys / 16; kk++) {
        const float (&x)[4] = s[2 * kk], (&y)[4] = s[2 * kk + 1];
        const uint32_t a[4] = {ptx::pack2<T>(x[0], x[1]), ptx::pack2<T>(x[2], x[3]), ptx::pack2<T>(y[0], y[1]),
                               ptx::pack2<T>(y[2], y[3])};
#pragma unroll
        for (int j = 0; j < Columns / 16; j++) {
          uint32_t b[4];
          value_fragment(b, kk, j, at);
          product(acc[2 * j], acc[2 * j + 1], a, b);
        }
      }
    };
    bool finite = true;
    if (hides) {
#pragma unroll 1
      for (int i = 0; i < Keys / 16 * (Columns / 16); i++) {
        uint32_t b[4];
        value_fragment(b, i / (Columns / 16), i % (Columns / 16), ptx::opaque(lane));
        finite = finite && all_finite<T>(b);
      }
      finite = !ptx::any(!finite);
    }
    if (finite)
      value_product(pair_mma<T>, at);
    else
      value_product(guarded_mma<T>, ptx::opaque(lane));
  }
};

}  // namespace attnjourney
