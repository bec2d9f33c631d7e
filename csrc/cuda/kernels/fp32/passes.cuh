// The passes before and after fp32_backward.
#pragma once
#include "cuda/kernels/common/backward_task.cuh"
#include "tiles.cuh"

namespace attnjourney {

constexpr int kFp32PassThreads = 256;

// Before: delta = sum(out * grad_out) - grad_lse, stats in parts, the sum for dQ cleared. One warp for each row of
// [batch, q_heads, rows] or, packed, [q_heads, rows]; d: the kernel's columns.
template <class Real>
__global__ void __launch_bounds__(kFp32PassThreads)
    fp32_prepare(const __grid_constant__ BackwardTaskOf<Real> p, int d, int64_t rows_in_all) {
  constexpr int kW = kFp32Lanes<Real>;
  const int64_t number = int64_t(blockIdx.x) * (kFp32PassThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (number >= rows_in_all) return;
  const int pair = static_cast<int>(number / p.rows);
  const ScratchRow own(p, pair, static_cast<int>(number - int64_t(pair) * p.rows));
  const Sequence sequence = sequence_of<true>(p, own.batch);
  const bool exists = own.row < sequence.q_len;
  Real sum = 0;
  const auto row_of = [&](const void* base, const Strides& s) {
    return static_cast<const Real*>(base) + own.batch * s.batch + own.head * s.head +
           (sequence.q_begin + own.row) * s.row;
  };
  if (exists)
    for (int c = lane * kW; c < p.v_head_dim; c += 32 * kW) {
      Real x[kW], y[kW];
      read_chunk(x, reinterpret_cast<const unsigned char*>(row_of(p.out, p.out_strides) + c));
      read_chunk(y, reinterpret_cast<const unsigned char*>(row_of(p.grad_out, p.grad_out_strides) + c));
#pragma unroll
      for (int j = 0; j < kW; j++) sum += x[j] * y[j];
    }
#pragma unroll
  for (int m = 1; m < 32; m *= 2) sum += ptx::shfl_xor(sum, m);
  if (lane == 0) {
    const int64_t stat = stat_row(p, own, sequence.q_begin);
    const RowStats<Real> stats = exists ? p.stats[stat] : RowStats<Real>{0, 0};
    if (p.grad_lse && exists) sum -= p.grad_lse[stat];
    write_row(p, number, stats, sum);
  }
  if (p.grad_query)
    for (int c = lane; c < d; c += 32) p.query_sum[number * d + c] = 0;
}

// One chunk of the sum for dQ, which lies in units of 16 rows, or 8, by 8 chunks (Fp32Backward::unit_at). number: of
// the row among all.
template <class Real>
__device__ __forceinline__ void fp32_query_sum(Real (&x)[kFp32Lanes<Real>], const BackwardTaskOf<Real>& p, int d,
                                               int64_t number, int row, int chunk) {
  constexpr int kW = kFp32Lanes<Real>;
  const int height = p.tile_rows < 16 ? p.tile_rows : 16, tile_size = 8 * height;
  const int in_tile = row % p.tile_rows, unit = chunk / 8 * (p.tile_rows / height) + in_tile / height;
  const Real* from = p.query_sum + (number - in_tile) * d + unit * kW * tile_size +
                     (in_tile / 8 % 2 * 2 + chunk % 2) * 32 + in_tile % 8 * 4 + chunk % 8 / 2;
#pragma unroll
  for (int j = 0; j < kW; j++) x[j] = from[j * tile_size];
}

// After: dQ = scale * sum; read(x, number, row, chunk) gives the sum. One thread for each chunk.
template <class Real, class Read>
__device__ __forceinline__ void fp32_query_chunk(const BackwardTaskOf<Real>& p, int d, int64_t rows_in_all,
                                                 Read&& read) {
  constexpr int kW = kFp32Lanes<Real>;
  const int64_t i = int64_t(blockIdx.x) * kFp32PassThreads + threadIdx.x, number = i / (d / kW);
  const int chunk = static_cast<int>(i - number * (d / kW));
  if (number >= rows_in_all || chunk * kW >= p.head_dim) return;
  const int pair = static_cast<int>(number / p.rows), row = static_cast<int>(number - int64_t(pair) * p.rows);
  const ScratchRow own(p, pair, row);
  const Sequence sequence = sequence_of<true>(p, own.batch);
  if (own.row >= sequence.rows) return;
  Real x[kW];
  read(x, number, row, chunk);
#pragma unroll
  for (int j = 0; j < kW; j++) x[j] *= p.scale;
  write_chunk(static_cast<Real*>(p.grad_query) + own.batch * p.grad_query_strides.batch +
                  own.head * p.grad_query_strides.head + (sequence.q_begin + own.row) * p.grad_query_strides.row +
                  chunk * kW,
              x);
}
template <class Real>
__global__ void __launch_bounds__(kFp32PassThreads)
    fp32_query(const __grid_constant__ BackwardTaskOf<Real> p, int d, int64_t rows_in_all) {
  fp32_query_chunk(p, d, rows_in_all, [&](Real(&x)[kFp32Lanes<Real>], int64_t number, int row, int chunk) {
    fp32_query_sum(x, p, d, number, row, chunk);
  });
}

}  // namespace attnjourney
