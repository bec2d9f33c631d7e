// The gradient of a floating mask (mask_gradient.cuh) on mma.sync, for 16 bits, in slices of up to 128 columns. D: 64,
// 128, or 256 for any number of slices.
#pragma once
#include "cuda/kernels/common/backward_passes.cuh"
#include "cuda/kernels/common/mask_gradient.cuh"
#include "forward.cuh"

namespace attnjourney {

template <class T_, int D>
struct Sm80MaskGradient : MaskGradientOfTiles<Sm80MaskGradient<T_, D>, float, 64> {
  using T = T_;
  using Tiles = Sm80Forward<T, D, D, 64, true>;
  static constexpr int kColumns = D < 128 ? D : 128;  // of a slice
  static constexpr int kKeys = 64, kBlocks = D == 128 ? 3 : 2, kTileBytes = 64 * kColumns * 2,
                       kSmemBytes = 4 * kTileBytes;
  using Products = float[kKeys / 8][4];

  static __device__ __forceinline__ int stat_position(int row) { return attnjourney::stat_position(row); }

  // a B^T of this warp's 16 rows
  static __device__ __forceinline__ void product(Products& acc, uint32_t a_tile, uint32_t b_tile, int warp, int lane) {
#pragma unroll 4
    for (int kk = 0; kk < kColumns / 16; kk++) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, Tiles::template chunk_at<kColumns>(a_tile, warp * 16 + lane % 16, kk * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < kKeys / 16; j++) {
        uint32_t b[4];
        ptx::ldmatrix_x4(
            b, Tiles::template chunk_at<kColumns>(b_tile, j * 16 + lane % 8 + lane / 16 * 8, kk * 2 + lane / 8 % 2));
        pair_mma<T>(acc[2 * j], acc[2 * j + 1], a, b);
      }
    }
  }

  static __device__ __forceinline__ void products(Products& s, Products& dp, const BackwardTask& p,
                                                  const Sequence& sequence, int batch, int head, int row0, int n0) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head_k = head / p.group;
    const uint32_t tile = ptx::smem_addr(ptx::dynamic_smem());
#pragma unroll
    for (int i = 0; i < kKeys / 2; i++) s[i / 4][i % 4] = dp[i / 4][i % 4] = 0.f;
    const int columns = D > kColumns ? max(p.head_dim, p.v_head_dim) : D;
#pragma unroll 1
    for (int c = 0; c < columns; c += kColumns) {
      const auto load = [&](int slot, const void* base, const Strides& s, int head_, int row0, int rows, int dim) {
        Tiles::template load_tile<kColumns, 64>(tile + slot * kTileBytes,
                                                static_cast<const T*>(base) + batch * s.batch + head_ * s.head + c,
                                                s.row, row0, rows, dim - c);
      };
      __syncthreads();  // @tiles_read: those of the step before
      load(0, p.query, p.query_strides, head, row0, sequence.q_len, p.head_dim);
      load(1, p.key, p.key_strides, head_k, n0, sequence.keys.key_length, p.head_dim);
      load(2, p.grad_out, p.grad_out_strides, head, row0, sequence.q_len, p.v_head_dim);
      load(3, p.value, p.value_strides, head_k, n0, sequence.keys.key_length, p.v_head_dim);
      ptx::cp_async_wait<0>();
      __syncthreads();
      product(s, tile, tile + kTileBytes, warp, lane);
      product(dp, tile + 2 * kTileBytes, tile + 3 * kTileBytes, warp, lane);
    }
  }
};

}  // namespace attnjourney
