// The gradient of a floating mask (mask_gradient.cuh) for float and double, in slices of the columns.
#pragma once
#include "cuda/kernels/common/mask_gradient.cuh"
#include "tiles.cuh"

namespace attnjourney {

template <class Real>
struct Fp32MaskGradient : MaskGradientOfTiles<Fp32MaskGradient<Real>, Real, 32> {
  using T = Real;
  static constexpr int kRows = 64, kKeys = 32, kThreads = 128, kColumns = 256 / sizeof(Real);  // of a slice
  static constexpr int kRowBytes = kRows * 256, kPair = (kRows + kKeys) * 256, kSmemBytes = 2 * kPair;
  static constexpr int kPart = 2;  // tiles of 8 keys at a time
  using Products = Real[kKeys / 8][4];

  static __device__ __forceinline__ int stat_position(int row) { return row; }

  static __device__ __forceinline__ void products(Products& s, Products& dp, const BackwardTaskOf<Real>& p,
                                                  const Sequence& sequence, int batch, int head, int row0, int n0) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head_k = head / p.group;
    unsigned char* const smem = ptx::dynamic_smem();
#pragma unroll
    for (int i = 0; i < kKeys / 2; i++) s[i / 4][i % 4] = dp[i / 4][i % 4] = 0;
    const auto slice = [&](const void* a, const Strides& sa, const void* b, const Strides& sb, int dim, int pair,
                           int c) {
      const auto load = [&]<int Count>(int at, const void* base, const Strides& of, int head_, int first, int rows) {
        fp32_load<Real, kColumns, Count, kThreads>(
            ptx::smem_addr(smem) + pair * kPair + at,
            static_cast<const Real*>(base) + batch * of.batch + head_ * of.head + c, of.row, first, rows, dim - c);
      };
      load.template operator()<kRows>(0, a, sa, head, row0, sequence.q_len);
      load.template operator()<kKeys>(kRowBytes, b, sb, head_k, n0, sequence.keys.key_length);
    };
    const auto add = [&](Products& sum, int pair) {
      const RowReader<Real, kColumns> rows(smem + pair * kPair, warp * 16, lane);
      const auto operands = [&](Fp32Operand<Real>(&a)[kFp32Lanes<Real> / 2], int chunks) {
        row_operands<Real, kColumns>(a, rows, chunks);
      };
#pragma unroll
      for (int j = 0; j < kKeys / 8; j += kPart) {
        Real part[kPart][4];
        rows_product<Real, kColumns>(part, operands, smem + pair * kPair + kRowBytes, 8 * j, kColumns, lane);
#pragma unroll
        for (int i = 0; i < 4 * kPart; i++) sum[j + i / 4][i % 4] += part[i / 4][i % 4];
      }
    };
#pragma unroll 1
    for (int c = 0; c < p.head_dim || c < p.v_head_dim; c += kColumns) {
      __syncthreads();  // the tiles of the step before have been read
      slice(p.query, p.query_strides, p.key, p.key_strides, p.head_dim, 0, c);
      slice(p.grad_out, p.grad_out_strides, p.value, p.value_strides, p.v_head_dim, 1, c);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      __syncthreads();
      add(s, 0);
      add(dp, 1);
    }
  }
};

}  // namespace attnjourney
