// The gradient of a floating mask in the mask's own shape, without atomics: one block sums a tile of 64 rows by Keys
// keys (all of them, where the mask broadcasts over rows or keys) over the heads and batch items that share it, one
// after the other, from S = Q K^T and dP = dO V^T, recomputed. Four warps of 16 rows.
#pragma once
#include "backward_task.cuh"
#include "scores.cuh"

namespace attnjourney {

// Tiles, which derives from this: the type T of the tensors, where a row's statistics lie (stat_position), and
// products(s, dp, task, sequence, batch, head, row0, n0), which begins with a barrier; or an add() of its own. Real: of
// the sums.
template <class Tiles, class Real, int Keys>
struct MaskGradientOfTiles {
  static constexpr int kRows = 64, kKeys = Keys, kThreads = 128, kBlocks = 2;  // kBlocks: on a multiprocessor, or more
  using Fragment = RowFragment<kKeys / 8>;
  using Products = Real[kKeys / 8][4];

  template <class Task>
  static __device__ __forceinline__ void run(const Task& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const MaskGradientOf<Real>& out = p.mask_gradient;
    const int row_tiles = (p.q_len + kRows - 1) / kRows, key_tiles = (p.kv_len + kKeys - 1) / kKeys;
    const int own_rows = out.row ? row_tiles : 1, own_keys = out.col ? key_tiles : 1;
    int i = blockIdx.x;
    const int key_tile = i % own_keys, row_tile = i / own_keys % own_rows;
    i /= own_keys * own_rows;
    const int own_head = i % out.heads, own_item = i / out.heads;
    const int64_t item_size = out.heads * (out.row ? int64_t{p.q_len} : 1) * (out.col ? int64_t{p.kv_len} : 1);

    Products sum = {};
    for (int b = 0; b < p.batch; b++) {
      if (batch_offset(p.scores, out.batch, b) != own_item * item_size) continue;
      const Sequence sequence = sequence_of(p, b);
      for (int h = out.head ? own_head : 0; h < (out.head ? own_head + 1 : p.q_heads); h++)
        for (int r = out.row ? row_tile : 0; r < (out.row ? row_tile + 1 : row_tiles); r++) {
          const KeyTiles tiles = key_tiles_of<kKeys, true>(p, sequence, r * kRows, r * kRows + kRows - 1);
          for (int n = out.col ? key_tile : 0; n < (out.col ? key_tile + 1 : key_tiles); n++)
            if (tiles.has(n)) Tiles::add(sum, p, sequence, b, h, r * kRows, n * kKeys);
        }
    }
    const int64_t first = own_item * item_size + own_head * out.head;
    write(p, out, first, sum, row_tile * kRows + warp * 16 + lane / 4, key_tile * kKeys + lane % 4 * 2);
  }

  // one tile of one head
  static __device__ __forceinline__ void add(Products& sum, const BackwardTaskOf<Real>& p, const Sequence& sequence,
                                             int batch, int head, int row0, int n0) {
    Products s, dp;
    Tiles::products(s, dp, p, sequence, batch, head, row0, n0);
    const HeadScoresOf<Real> scores(p, p.q_heads, batch, head);
    const int lane = threadIdx.x % 32, row = row0 + threadIdx.x / 32 * 16 + lane / 4, key = n0 + lane % 4 * 2;
    const uint32_t seen = seen_in_range<Fragment>(sequence, row, key);
    const uint32_t bits = p.scores.seed ? kept(p.scores, scores, row, key, lane, Fragment{}) : ~0u;
    const int64_t first = (int64_t(batch) * p.q_heads + head) * p.rows;
    RowStats<Real> stats[2];
    Real delta[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const bool exists = row + 8 * h < sequence.q_len;
      const int64_t at = first + Tiles::stat_position(row + 8 * h);
      stats[h] = exists ? RowStats<Real>{p.reference[at], p.inverse[at]} : RowStats<Real>{INFINITY, 0};
      delta[h] = exists ? p.delta[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < Fragment::kCount; i++) {
      const int h = i / 2 % 2;
      sum[i / 4][i % 4] +=
          weighted<typename Tiles::T>(p.scores, scores, row + Fragment::row(i), key + Fragment::key(i),
                                      sequence.keys.offset, seen >> i & 1, bits >> i & 1, s[i / 4][i % 4],
                                      p.score_scale, stats[h], dp[i / 4][i % 4], delta[h])
              .grad;
    }
  }

  // row, key: of the thread's element 0; where the mask broadcasts over rows or keys, sums over those of the tile first
  static __device__ __forceinline__ void write(const BackwardTaskOf<Real>& p, const MaskGradientOf<Real>& out,
                                               int64_t first, Products& sum, int row, int key) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Real* to = out.sum + first;
    if (out.row && out.col) {
#pragma unroll
      for (int i = 0; i < Fragment::kCount; i++) {
        const int r = row + Fragment::row(i), k = key + Fragment::key(i);
        if (r < p.q_len && k < p.kv_len) to[r * out.row + k * out.col] = sum[i / 4][i % 4];
      }
      return;
    }
    Real* parts = reinterpret_cast<Real*>(ptx::dynamic_smem());  // [warp][kKeys]
    __syncthreads();                                             // the last tiles have been read
    if (out.col) {                                               // one number for each key
#pragma unroll
      for (int j = 0; j < kKeys / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          Real x = sum[j][e] + sum[j][2 + e];
#pragma unroll
          for (int m = 4; m < 32; m *= 2) x += ptx::shfl_xor(x, m);
          if (lane < 4) parts[warp * kKeys + 8 * j + 2 * lane + e] = x;
        }
      __syncthreads();
      const int k = key - lane % 4 * 2 + threadIdx.x;
      if (threadIdx.x < kKeys && k < p.kv_len)
        to[k * out.col] = parts[threadIdx.x] + parts[kKeys + threadIdx.x] + parts[2 * kKeys + threadIdx.x] +
                          parts[3 * kKeys + threadIdx.x];
      return;
    }
    Real of_row[2] = {};  // one number for each row, or for all
#pragma unroll
    for (int i = 0; i < Fragment::kCount; i++) of_row[i / 2 % 2] += sum[i / 4][i % 4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      of_row[h] += ptx::shfl_xor(of_row[h], 1);
      of_row[h] += ptx::shfl_xor(of_row[h], 2);
      if (out.row && lane % 4 == 0 && row + 8 * h < p.q_len) to[(row + 8 * h) * out.row] = of_row[h];
    }
    if (out.row) return;
    Real x = of_row[0] + of_row[1];
#pragma unroll
    for (int m = 4; m < 32; m *= 2) x += ptx::shfl_xor(x, m);
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    if (threadIdx.x == 0) *to = parts[0] + parts[1] + parts[2] + parts[3];
  }
};

// blocks of the mask's gradient
template <class Tiles, class Real>
inline int64_t mask_gradient_blocks(const BackwardTaskOf<Real>& p) {
  const MaskGradientOf<Real>& m = p.mask_gradient;
  const int64_t rows = m.row ? (p.q_len + 63) / 64 : 1, keys = m.col ? (p.kv_len + Tiles::kKeys - 1) / Tiles::kKeys : 1;
  return rows * keys * m.items * m.heads;
}

// After backward_prepare or fp32_prepare.
template <class Tiles, class Real>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    mask_gradient(const __grid_constant__ BackwardTaskOf<Real> p) {
  Tiles::run(p);
}

}  // namespace attnjourney
