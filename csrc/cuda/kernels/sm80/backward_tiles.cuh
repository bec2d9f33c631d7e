// The tiles of the mma.sync backward in shared memory, and the products that read them.
#pragma once
#include "cuda/kernels/common/backward_task.cuh"
#include "cuda/kernels/common/scores.cuh"

namespace attnjourney {

// Warps in a grid of kWarps / 2 (keys) x 2: halves of the queries for S^T and dP^T, of the columns for dK and dV.
template <class T, int D, int Rows, int Keys>
struct Sm80BackwardTiles {
  static constexpr int kThreads = Keys < 64 ? 128 : 256, kWarps = kThreads / 32;
  static constexpr int kRow = D * 2, kColumn = Rows * 2;  // bytes of a row of D, of a key's scores
  static constexpr int kWarpKeys = Keys / (kWarps / 2), kKeyTiles = kWarpKeys / 16;  // tiles of 16 keys
  static constexpr int kRowTiles = Rows / 16, kRowSteps = Rows / 32;  // of 8 and of 16 of a warp's queries
  static constexpr int kColumnTiles = D / 16;                         // of 8 of a warp's D / 2 columns
  static constexpr int kParts = 8, kQueryParts = D / 32;              // 32 x 32 of dQ: all, and along D
  static_assert(Rows * D == kParts * 1024 && kParts % kWarps == 0);

  static __device__ __forceinline__ uint32_t at_row(uint32_t tile, int row, int chunk) {
    return tile + row * kRow + ((chunk ^ (row & 7)) << 4);
  }
  static __device__ __forceinline__ uint32_t at_col(uint32_t tile, int row, int chunk) {
    return tile + row * kColumn + ((chunk ^ (Rows == 32 ? row >> 1 & 3 : row & 7)) << 4);  // 32: rows of four chunks
  }

  template <int Count>
  static __device__ __forceinline__ void load_tile(uint32_t tile, const T* base, int row0, int rows, int64_t stride,
                                                   int dim) {
    const int tid = ptx::opaque(threadIdx.x);
#pragma unroll
    for (int i = 0; i < Count * (D / 8) / kThreads; i++) {
      const int c = i * kThreads + tid, row = c / (D / 8), chunk = c % (D / 8);
      const bool valid = row0 + row < rows && chunk * 8 < dim;
      ptx::cp_async_16(at_row(tile, row, chunk), base + (valid ? (row0 + row) * stride + chunk * 8 : 0), valid);
    }
  }

  // Eight columns of a row of dQ from a tile of query_sum, in the order in which warps add 32 consecutive floats.
  static __device__ __forceinline__ void load_query(float (&x)[8], const float* tile, int row, int chunk) {
    const int part = row / 32 * kQueryParts + chunk / 4;
    const int element = (row % 32 / 16 * 4 + chunk % 4) * 4 + row % 16 / 8 * 2;
    const float* at = tile + (element * kParts + part) * 32 + row % 8 * 4;
    const float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + kParts * 32);
    x[0] = a.x, x[1] = b.x, x[2] = a.y, x[3] = b.y, x[4] = a.z, x[5] = b.z, x[6] = a.w, x[7] = b.w;
  }

  using Scores = float[kKeyTiles][kRowTiles][4];
  using KeySums = float[kKeyTiles][kColumnTiles][4];
  using Operands = uint32_t[kKeyTiles][kRowSteps][4];  // of the products with S^T or dP^T as A

  // Where a thread stands; made opaque in every iteration: hoisted out of the loop, addresses made of these would
  // spill.
  struct Lane {
    int key_warp, row_warp;          // of the warps' grid
    int group, member;               // row and column pair of an accumulator
    int row16, half, row8, quarter;  // which rows and chunks ldmatrix reads
    __device__ __forceinline__ Lane(int warp, int lane)
        : key_warp(warp / 2),
          row_warp(warp % 2),
          group(lane / 4),
          member(lane % 4),
          row16(lane % 16),
          half(lane / 16),
          row8(lane % 8),
          quarter(lane / 8 % 2) {}
    // of element 0 of a fragment, in its tile
    __device__ __forceinline__ int key() const { return key_warp * kWarpKeys + group; }
    __device__ __forceinline__ int row() const { return row_warp * (Rows / 2) + 2 * member; }
  };

  // acc += A B^T, both K-major; the fragments of the next k step are read before this one's products.
  static __device__ __forceinline__ void product(Scores& acc, uint32_t a_tile, uint32_t b_tile, const Lane& l) {
    uint32_t a[2][kKeyTiles][4], b[2][kRowTiles / 2][4];
    const auto read = [&](int kk) {
#pragma unroll
      for (int i = 0; i < kKeyTiles; i++)
        ptx::ldmatrix_x4(a[kk & 1][i], at_row(a_tile, l.key_warp * kWarpKeys + i * 16 + l.row16, kk * 2 + l.half));
#pragma unroll
      for (int j = 0; j < kRowTiles / 2; j++)
        ptx::ldmatrix_x4(b[kk & 1][j],
                         at_row(b_tile, l.row_warp * (Rows / 2) + j * 16 + l.row8 + l.half * 8, kk * 2 + l.quarter));
    };
    read(0);
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) {
      const int now = kk & 1;
      if (kk + 1 < D / 16) read(kk + 1);
#pragma unroll
      for (int j = 0; j < kRowTiles / 2; j++)
#pragma unroll
        for (int i = 0; i < kKeyTiles; i++) {
          ptx::mma_m16n8k16<T>(acc[i][2 * j], a[now][i], b[now][j][0], b[now][j][1]);
          ptx::mma_m16n8k16<T>(acc[i][2 * j + 1], a[now][i], b[now][j][2], b[now][j][3]);
        }
    }
  }

  // This warp's keys of 16 queries from first_row on, of P or dS.
  static __device__ __forceinline__ void read_keys(uint32_t (&a)[kKeyTiles][4], uint32_t tile, int first_row,
                                                   const Lane& l) {
#pragma unroll
    for (int i = 0; i < kKeyTiles; i++)
      ptx::ldmatrix_x4(a[i], at_col(tile, l.key_warp * kWarpKeys + i * 16 + l.row16, first_row / 8 + l.half));
  }
  // acc += A B for these 16 queries
  template <bool Guarded>
  static __device__ __forceinline__ void accumulate_step(KeySums& acc, const uint32_t (&a)[kKeyTiles][4],
                                                         uint32_t b_tile, int first_row, const Lane& l) {
#pragma unroll
    for (int j = 0; j < kColumnTiles / 2; j++) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, at_row(b_tile, first_row + l.row16, l.row_warp * (D / 16) + j * 2 + l.half));
#pragma unroll
      for (int i = 0; i < kKeyTiles; i++) {
        const auto mma = Guarded ? guarded_mma<T> : pair_mma<T>;
        mma(acc[i][2 * j], acc[i][2 * j + 1], a[i], b);
      }
    }
  }
  // acc += A B over this warp's half of the queries (A in registers), then over the other half (A from shared memory).
  static __device__ __forceinline__ void accumulate(KeySums& acc, const Operands& own, uint32_t other, uint32_t b_tile,
                                                    const Lane& l) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int kk = 0; kk < kRowSteps; kk++) {
        const int first_row = (half ? l.row_warp ^ 1 : l.row_warp) * (Rows / 2) + kk * 16;
        uint32_t a[kKeyTiles][4];
        if (half)
          read_keys(a, other, first_row, l);
        else
#pragma unroll
          for (int i = 0; i < 4 * kKeyTiles; i++) a[i / 4][i % 4] = own[i / 4][kk][i % 4];
        accumulate_step<false>(acc, a, b_tile, first_row, l);
      }
  }
  // The same where B may hold numbers that are not finite: seldom, so all of A from shared memory, a step at a time.
  static __device__ __forceinline__ void accumulate_guarded(KeySums& acc, uint32_t a_tile, uint32_t b_tile,
                                                            const Lane& l) {
#pragma unroll 1
    for (int first_row = 0; first_row < Rows; first_row += 16) {
      uint32_t a[kKeyTiles][4];
      read_keys(a, a_tile, first_row, l);
      accumulate_step<true>(acc, a, b_tile, first_row, l);
    }
  }
  // Are all numbers finite that the products with rows [0, Count) of a tile, columns of chunks [chunk, chunk + Chunks),
  // read? The whole warp.
  template <int Count, int Chunks>
  static __device__ __forceinline__ bool finite(uint32_t tile, int chunk, const Lane& l) {
    bool good = true;
#pragma unroll 1
    for (int i = 0; i < Count / 16 * (Chunks / 2); i++) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, at_row(tile, i / (Chunks / 2) * 16 + l.row16, chunk + i % (Chunks / 2) * 2 + l.half));
      good = good && all_finite<T>(b);
    }
    return !ptx::any(!good);
  }
  template <bool Guarded>
  static __device__ __forceinline__ void query_product(float (&dq)[2][4][4], uint32_t score_grad, uint32_t keys,
                                                       int first_row, int first_chunk, const Lane& l) {
#pragma unroll(Guarded ? 1 : Keys / 16)
    for (int kk = 0; kk < Keys / 16; kk++) {
      uint32_t a[2][4], b[4];
#pragma unroll
      for (int i = 0; i < 2; i++)
        ptx::ldmatrix_x4_trans(a[i],
                               at_col(score_grad, kk * 16 + l.half * 8 + l.row8, first_row / 8 + i * 2 + l.quarter));
#pragma unroll
      for (int j = 0; j < 2; j++) {
        ptx::ldmatrix_x4_trans(b, at_row(keys, kk * 16 + l.row16, first_chunk + j * 2 + l.half));
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const auto mma = Guarded ? guarded_mma<T> : pair_mma<T>;
          mma(dq[i][2 * j], dq[i][2 * j + 1], a[i], b);
        }
      }
    }
  }
};

}  // namespace attnjourney
