// The derivative of attention's backward in a direction for float and double: its products (tiles.cuh).
#pragma once
#include "cuda/kernels/common/backward_jvp.cuh"
#include "tiles.cuh"

namespace attnjourney {

template <class Real_>
struct Fp32BackwardJvpMath {
  using Real = Real_;
  using T = Real;
  static constexpr int kOthers = 16, kSumSlices = 4, kW = kFp32Lanes<Real>, kD = 8 * kW;  // kD: columns of a slice
  static constexpr int kThreads = 128, kWarps = 4;
  using Scores = Real[kOthers / 8][4];
  using Columns = Real[kW][4];
  struct Exact {
    Fp32Sum<Real> sum[kOthers / 8];  // of up to kSumColumns columns, as in the forward
  };

  static __device__ __forceinline__ int at(int row, int chunk) { return fp32_at<Real, kD>(row, chunk); }

  static __device__ __forceinline__ void add_products(Fp32Sum<Real> (&sum)[kOthers / 8], const unsigned char* own,
                                                      const unsigned char* other, int row0, int lane) {
    const RowReader<Real, kD> rows(own, row0, lane), others(other, 0, lane);
    const auto read = [&](Fp32Operand<Real>(&a)[kW / 2], int chunks) { row_operands<Real, kD>(a, rows, chunks); };
    add_rows_product<Real, kD, kD>(sum, read, others, 0);
  }
  static __device__ __forceinline__ void take(Scores& s, const Fp32Sum<Real> (&sum)[kOthers / 8]) {
#pragma unroll
    for (int i = 0; i < kOthers / 2; i++) s[i / 4][i % 4] += sum[i / 4][i % 4];
  }
  static __device__ __forceinline__ void add(Scores& s, const unsigned char* own, const unsigned char* other, int row0,
                                             int lane) {
    Fp32Sum<Real> sum[kOthers / 8];
    add_products(sum, own, other, row0, lane);
    take(s, sum);
  }
  static __device__ __forceinline__ void add_exact(Scores& s, Exact& exact, const unsigned char* own,
                                                   const unsigned char* other, int row0, int slice, bool last,
                                                   int lane) {
    add_products(exact.sum, own, other, row0, lane);
    if (!last && (slice + 1) * kD % kSumColumns) return;
    take(s, exact.sum);
    exact = {};
  }

  static __device__ __forceinline__ void sum(Columns& d, const Scores& weights, unsigned char* other, bool hides,
                                             uint32_t* flags, int& flags_turn, int lane) {
    if (hides) guard(d, weights, other, flags, flags_turn, lane);
    Fp32Operand<Real> a[kOthers / 8];
#pragma unroll
    for (int k = 0; k < kOthers / 8; k++) weight_operand(a[k], weights[k]);
    Fp32Sum<Real> sum[kW];
    columns_product<Real, kD, kOthers / 8>(sum, [&](Fp32Operand<Real>& x, int k) { x = a[k]; }, other, 0, lane);
#pragma unroll
    for (int i = 0; i < 4 * kW; i++) d[i / 4][i % 4] += sum[i / 4][i % 4];
  }
  // Rows of the other side that are not finite count where their weight is not 0. The whole block.
  static __device__ __forceinline__ void guard(Columns& d, const Scores& weights, unsigned char* other, uint32_t* flags,
                                               int& flags_turn, int lane) {
    if (!block_any(!share_finite<Real, kD, kOthers, kThreads>(other), flags, flags_turn, kWarps)) return;
    uint32_t bits[2];
    weight_bits<kOthers / 8>(bits, weights, lane);
    mark_not_finite<Real, kD, 1>(d, bits, other, 0, lane);
    __syncthreads();  // @others_seen: by all warps
    clear_share<Real, kD, kOthers, kThreads>(other);
    __syncthreads();
  }

  // row 8 h of a thread, columns from `first` on
  static __device__ __forceinline__ void write(Real* to, const Columns& d, int h, Real scale, int first, int dim,
                                               int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = first + (lane % 4 * 2 + i) * kW;
      if (column >= dim) continue;
      Real x[kW];
#pragma unroll
      for (int j = 0; j < kW; j++) x[j] = d[j][2 * h + i] * scale;
      write_chunk(to + column, x);
    }
  }
};

}  // namespace attnjourney
