// The passes before and after every backward kernel; 256 threads a block. The kernels add dQ up in float32 in memory,
// which the pass before them clears and that after them rounds.
#pragma once
#include "backward_task.cuh"
#include "scores.cuh"

namespace attnjourney {

constexpr int kPassThreads = 256;

// Where a row's statistics are: within 16 rows in the order in which a thread of an accumulator fragment wants its
// columns, 2t, 2t+1, 2t+8, 2t+9.
__device__ __forceinline__ int stat_position(int row) {
  return (row & ~15) + (row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2);
}

// blocks of a pass over `rows` rows of D columns for each of `pairs`; 8 columns a thread
inline int64_t pass_blocks(int64_t rows, int d, int64_t pairs) {
  return (rows * (d / 8) + kPassThreads - 1) / kPassThreads * pairs;
}

// Before: delta = sum(out * grad_out) - grad_lse, stats in parts, the sum for dQ cleared.
// Threads of a row in the pass before a kernel of D columns: D / 8, or the next power of two, and at most a warp.
template <int D>
constexpr int kPrepareThreads = D == 192 || D > 256 ? 32 : D / 8;
template <class T, int D>
__global__ void __launch_bounds__(kPassThreads) backward_prepare(const BackwardTask p) {
  constexpr int kPer = kPrepareThreads<D>, kRows = kPassThreads / kPer, kChunks = (D / 8 + kPer - 1) / kPer;
  const int blocks = (p.rows + kRows - 1) / kRows, pair = blockIdx.x / blocks;
  const int row = (blockIdx.x - pair * blocks) * kRows + threadIdx.x / kPer, first_chunk = threadIdx.x % kPer;
  const ScratchRow own(p, pair, row);
  const Sequence sequence = sequence_of<true>(p, own.batch);
  const bool exists = own.row < sequence.q_len;
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < kChunks; k++) {
    const int c = first_chunk + k * kPer;
    if (!exists || c * 8 >= p.v_head_dim) break;
    const auto read = [&](const void* base, const Strides& s) {
      return *reinterpret_cast<const uint4*>(static_cast<const T*>(base) + own.batch * s.batch + own.head * s.head +
                                             (sequence.q_begin + own.row) * s.row + c * 8);
    };
    const uint4 a = read(p.out, p.out_strides), b = read(p.grad_out, p.grad_out_strides);
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 u = ptx::unpack2<T>(x[i]), w = ptx::unpack2<T>(y[i]);
      sum += u.x * w.x + u.y * w.y;
    }
  }
#pragma unroll
  for (int m = 1; m < kPer; m *= 2) sum += ptx::shfl_xor(sum, m);
  if (row >= p.rows) return;
  const int64_t first = int64_t(pair) * p.rows;
  if (p.query_blocks && row == 0 && first_chunk == 0) p.query_blocks[pair] = 0;
  if (first_chunk == 0) {
    const int64_t stat = stat_row(p, own, sequence.q_begin);
    const RowStats<float> stats = exists ? p.stats[stat] : RowStats<float>{0.f, 0.f};
    if (p.grad_lse && exists) sum -= p.grad_lse[stat];
    write_row(p, first + stat_position(row), stats, sum);
  }
#pragma unroll
  for (int k = 0; k < kChunks; k++) {
    const int c = first_chunk + k * kPer;
    if (c >= D / 8) return;
    float4* z = reinterpret_cast<float4*>(p.query_sum + (first + row) * D + c * 8);
    z[0] = z[1] = float4{0.f, 0.f, 0.f, 0.f};
  }
}

template <class T>
__device__ __forceinline__ void write_scaled(void* base, const Strides& s, int batch, int head, int row, int c,
                                             const float (&x)[8], float scale) {
  uint4 r;
  r.x = ptx::pack2<T>(x[0] * scale, x[1] * scale);
  r.y = ptx::pack2<T>(x[2] * scale, x[3] * scale);
  r.z = ptx::pack2<T>(x[4] * scale, x[5] * scale);
  r.w = ptx::pack2<T>(x[6] * scale, x[7] * scale);
  *reinterpret_cast<uint4*>(static_cast<T*>(base) + batch * s.batch + head * s.head + row * s.row + c * 8) = r;
}

// The i-th piece of rows of D columns, a row's chunk of 8: consecutive threads take consecutive rows, in pairs of
// chunks, so that reads in fragment order and writes in rows both cover whole sectors.
template <int D>
struct PassPiece {
  int row, chunk;
  explicit __device__ __forceinline__ PassPiece(int i)
      : row(i / D * 8 + i / 2 % 8), chunk(i / 16 % (D / 16) * 2 + i % 2) {}
};
template <int D>
struct PassPosition {
  int pair, row, chunk;
  explicit __device__ __forceinline__ PassPosition(int rows) {
    const int blocks = (rows * (D / 8) + kPassThreads - 1) / kPassThreads;
    pair = blockIdx.x / blocks;
    const PassPiece<D> piece((blockIdx.x - pair * blocks) * kPassThreads + threadIdx.x);
    row = piece.row, chunk = piece.chunk;
  }
};

// After: dQ = scale * sum. Kernel::load_query finds the eight values of (row of the tile, columns 8 c ..).
template <class Kernel>
__global__ void __launch_bounds__(kPassThreads) backward_query(const BackwardTask p) {
  const PassPosition<Kernel::kD> at(p.rows);
  if (at.row >= p.rows || at.chunk * 8 >= p.head_dim) return;
  const ScratchRow own(p, at.pair, at.row);
  const Sequence sequence = sequence_of<true>(p, own.batch);
  if (own.row >= sequence.rows) return;
  const int64_t tile = int64_t(at.pair) * p.rows + at.row / Kernel::kRows * Kernel::kRows;
  float x[8];
  Kernel::load_query(x, p.query_sum + tile * Kernel::kD, at.row % Kernel::kRows, at.chunk);
  write_scaled<typename Kernel::T>(p.grad_query, p.grad_query_strides, own.batch, own.head, sequence.q_begin + own.row,
                                   at.chunk, x, p.scale);
}

// After, where several query heads added up dK and dV. Pairs: [2, batch, kv_heads].
template <class Kernel>
__global__ void __launch_bounds__(kPassThreads) backward_key_value(const BackwardTask p) {
  const PassPosition<Kernel::kD> at(p.key_tiles * Kernel::kKeys);
  const int per = p.batch * p.kv_heads, pair = at.pair % per;
  const bool is_value = at.pair >= per;
  void* out = is_value ? p.grad_value : p.grad_key;
  if (!out || at.row >= p.kv_len || at.chunk * 8 >= (is_value ? p.v_head_dim : p.head_dim)) return;
  const int64_t tile = int64_t(at.pair) * p.key_tiles + at.row / Kernel::kKeys;
  float x[8];
  Kernel::load_key(x, p.key_value_sum + tile * (Kernel::kKeys * Kernel::kD), at.row % Kernel::kKeys, at.chunk);
  write_scaled<typename Kernel::T>(out, is_value ? p.grad_value_strides : p.grad_key_strides, pair / p.kv_heads,
                                   pair % p.kv_heads, at.row, at.chunk, x, is_value ? 1.f : p.scale);
}

}  // namespace attnjourney
