// The gradient of a floating mask in the mask's own shape, on mma.sync, without atomics: one block sums a tile of 64
// rows by 64 keys (all of them, where the mask broadcasts over rows or keys) over the heads and batch items that share
// it, one after the other, from S = Q K^T and dP = dO V^T computed once more. Four warps of 16 rows.
#pragma once
#include "backward_passes.cuh"
#include "sm80_forward.cuh"

namespace attnjourney {

template <class T_, int D>
struct Sm80MaskGradient {
  using T = T_;
  using Tiles = Sm80Forward<T, D, D, 64, true>;
  static constexpr int kRows = 64, kKeys = 64, kThreads = 128, kTileBytes = 64 * D * 2;
  static constexpr int kSmemBytes = 4 * kTileBytes;
  using Fragment = RowFragment<kKeys / 8>;
  using Products = float[kKeys / 8][4];

  // a B^T of this warp's 16 rows
  static __device__ __forceinline__ void product(Products& acc, uint32_t a_tile, uint32_t b_tile, int warp, int lane) {
#pragma unroll 4
    for (int kk = 0; kk < D / 16; kk++) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, Tiles::template chunk_at<D>(a_tile, warp * 16 + lane % 16, kk * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < kKeys / 16; j++) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b,
                         Tiles::template chunk_at<D>(b_tile, j * 16 + lane % 8 + lane / 16 * 8, kk * 2 + lane / 8 % 2));
        pair_mma<T>(acc[2 * j], acc[2 * j + 1], a, b);
      }
    }
  }

  static __device__ __forceinline__ void run(const BackwardTask& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const MaskGradient& out = p.mask_gradient;
    const int row_tiles = (p.q_len + kRows - 1) / kRows, key_tiles = (p.kv_len + kKeys - 1) / kKeys;
    const int own_rows = out.row ? row_tiles : 1, own_keys = out.col ? key_tiles : 1;
    int i = blockIdx.x;
    const int key_tile = i % own_keys, row_tile = i / own_keys % own_rows;
    i /= own_keys * own_rows;
    const int own_head = i % out.heads, own_item = i / out.heads;
    const int64_t item_size = out.heads * (out.row ? int64_t{p.q_len} : 1) * (out.col ? int64_t{p.kv_len} : 1);

    float sum[kKeys / 8][4] = {};
    for (int b = 0; b < p.batch; b++) {
      if (batch_offset(p.scores, out.batch, b) != own_item * item_size) continue;
      const Sequence sequence = sequence_of(p, b);
      for (int h = out.head ? own_head : 0; h < (out.head ? own_head + 1 : p.q_heads); h++)
        for (int r = out.row ? row_tile : 0; r < (out.row ? row_tile + 1 : row_tiles); r++) {
          const KeyTiles tiles = key_tiles_of<kKeys, true>(p, sequence, r * kRows, r * kRows + kRows - 1);
          for (int n = out.col ? key_tile : 0; n < (out.col ? key_tile + 1 : key_tiles); n++)
            if (n < tiles.prefix || (n >= tiles.begin && n < tiles.end)) add(sum, p, sequence, b, h, r, n, warp, lane);
        }
    }
    const int64_t first = own_item * item_size + own_head * out.head;
    write(p, out, first, sum, row_tile * kRows + warp * 16 + lane / 4, key_tile * kKeys + lane % 4 * 2);
  }

  // one tile of one head
  static __device__ __forceinline__ void add(Products& sum, const BackwardTask& p, const Sequence& sequence, int batch,
                                             int head, int row_tile, int key_tile, int warp, int lane) {
    const auto load = [&](int slot, const void* base, const Strides& s, int head_, int row0, int rows, int dim) {
      Tiles::template load_tile<D, 64>(ptx::smem_addr(ptx::dynamic_smem()) + slot * kTileBytes,
                                       static_cast<const T*>(base) + batch * s.batch + head_ * s.head, s.row, row0,
                                       rows, dim);
    };
    const int row0 = row_tile * kRows, n0 = key_tile * kKeys, head_k = head / p.group;
    __syncthreads();  // the tiles of the step before have been read
    load(0, p.query, p.query_strides, head, row0, sequence.q_len, p.head_dim);
    load(1, p.key, p.key_strides, head_k, n0, sequence.keys.key_length, p.head_dim);
    load(2, p.grad_out, p.grad_out_strides, head, row0, sequence.q_len, p.v_head_dim);
    load(3, p.value, p.value_strides, head_k, n0, sequence.keys.key_length, p.v_head_dim);
    ptx::cp_async_wait<0>();
    __syncthreads();
    const uint32_t tile = ptx::smem_addr(ptx::dynamic_smem());
    Products s = {}, dp = {};
    product(s, tile, tile + kTileBytes, warp, lane);
    product(dp, tile + 2 * kTileBytes, tile + 3 * kTileBytes, warp, lane);

    const HeadScores scores(p, p.q_heads, batch, head);
    const int row = row0 + warp * 16 + lane / 4, key = n0 + lane % 4 * 2;
    const uint32_t seen = seen_in_range<Fragment>(sequence, row, key);
    const uint32_t bits = p.scores.seed ? kept(p.scores, scores, row, key, lane, Fragment{}) : ~0u;
    const int64_t stats = (int64_t(batch) * p.q_heads + head) * p.rows;
    float lse[2], delta[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const bool exists = row + 8 * h < sequence.q_len;
      lse[h] = exists ? p.lse2[stats + stat_position(row + 8 * h)] : INFINITY;
      delta[h] = exists ? p.delta[stats + stat_position(row + 8 * h)] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < Fragment::kCount; i++) {
      const int h = i / 2 % 2;
      sum[i / 4][i % 4] +=
          weighted<T>(p.scores, scores, row + Fragment::row(i), key + Fragment::key(i), sequence.keys.offset,
                      seen >> i & 1, bits >> i & 1, s[i / 4][i % 4], p.scale_log2, lse[h], dp[i / 4][i % 4], delta[h])
              .grad;
    }
  }

  // row, key: of the thread's element 0; where the mask broadcasts over rows or keys, sums over those of the tile first
  static __device__ __forceinline__ void write(const BackwardTask& p, const MaskGradient& out, int64_t first,
                                               Products& sum, int row, int key) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* to = out.sum + first;
    if (out.row && out.col) {
#pragma unroll
      for (int i = 0; i < Fragment::kCount; i++) {
        const int r = row + Fragment::row(i), k = key + Fragment::key(i);
        if (r < p.q_len && k < p.kv_len) to[r * out.row + k * out.col] = sum[i / 4][i % 4];
      }
      return;
    }
    float* parts = reinterpret_cast<float*>(ptx::dynamic_smem());  // [warp][64]
    __syncthreads();                                               // the last tiles have been read
    if (out.col) {                                                 // one number for each key
#pragma unroll
      for (int j = 0; j < kKeys / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float x = sum[j][e] + sum[j][2 + e];
#pragma unroll
          for (int m = 4; m < 32; m *= 2) x += ptx::shfl_xor(x, m);
          if (lane < 4) parts[warp * 64 + 8 * j + 2 * lane + e] = x;
        }
      __syncthreads();
      const int k = key - lane % 4 * 2 + threadIdx.x;
      if (threadIdx.x < 64 && k < p.kv_len)
        to[k * out.col] =
            parts[threadIdx.x] + parts[64 + threadIdx.x] + parts[128 + threadIdx.x] + parts[192 + threadIdx.x];
      return;
    }
    float of_row[2] = {};  // one number for each row, or for all
#pragma unroll
    for (int i = 0; i < Fragment::kCount; i++) of_row[i / 2 % 2] += sum[i / 4][i % 4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      of_row[h] += ptx::shfl_xor(of_row[h], 1);
      of_row[h] += ptx::shfl_xor(of_row[h], 2);
      if (out.row && lane % 4 == 0 && row + 8 * h < p.q_len) to[(row + 8 * h) * out.row] = of_row[h];
    }
    if (out.row) return;
    float x = of_row[0] + of_row[1];
#pragma unroll
    for (int m = 4; m < 32; m *= 2) x += ptx::shfl_xor(x, m);
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    if (threadIdx.x == 0) *to = parts[0] + parts[1] + parts[2] + parts[3];
  }
};

// blocks of the mask's gradient
inline int64_t mask_gradient_blocks(const BackwardTask& p) {
  const MaskGradient& m = p.mask_gradient;
  const int64_t rows = m.row ? (p.q_len + 63) / 64 : 1, keys = m.col ? (p.kv_len + 63) / 64 : 1;
  return rows * keys * m.items * m.heads;
}

// After backward_prepare.
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) sm80_mask_gradient(const __grid_constant__ BackwardTask p) {
  Kernel::run(p);
}

}  // namespace attnjourney
