// Attention backward on mma.sync, for every GPU from Ampere on (FlashAttention-2, arXiv 2307.08691). One block: Keys
// keys of one key head, all query tiles of all its query heads. S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are
// already A operands of dV += P^T dO and dK += dS^T Q. Eight warps: S^T 4 (keys) x 2 (queries); dK, dV 4 (keys) x 2
// (columns); dQ 32 x 32 a warp.
#pragma once
#include "backward_passes.cuh"

namespace attnjourney {

template <class T_, int D, int Rows, int Keys, bool Deterministic>
struct Sm80Backward {
  using T = T_;
  static constexpr int kRows = Rows, kKeys = Keys, kD = D, kThreads = 256, kRow = D * 2, kCol = Rows * 2;
  static constexpr int kNT = Keys / 64;  // 16-key tiles of a warp: Keys / 4 keys
  static constexpr int kMT = Rows / 16,
                       kKS = Rows / 32;  // 8-query tiles of a warp's Rows / 2 queries, 16-steps in them
  static constexpr int kDT = D / 16;     // 8-column tiles of a warp's D / 2 columns
  static constexpr int kDqW = D / 32;    // warps along D in dQ
  static constexpr int kStage = Rows * kRow, kStats = Rows * 8;
  static constexpr int kSmemBytes = 2 * Keys * kRow + 4 * kStage + 2 * Keys * kCol + 2 * kStats;
  static_assert(Rows * D == 8192, "eight warps of 32 x 32 in dQ");

  static __device__ __forceinline__ uint32_t at_row(uint32_t tile, int row, int chunk) {
    return tile + row * kRow + ((chunk ^ (row & 7)) << 4);
  }
  static __device__ __forceinline__ uint32_t at_col(uint32_t tile, int row, int chunk) {
    return tile + row * kCol + ((chunk ^ (Rows == 32 ? row >> 1 & 3 : row & 7)) << 4);  // 32: rows of four chunks
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

  // Position of dQ element (row, col) of a tile: warp-wide additions to 32 consecutive floats.
  static __device__ __forceinline__ void load_query(float (&x)[8], const float* tile, int row, int c) {
    const int warp = row / 32 * kDqW + c / 4, reg = (row % 32 / 16 * 4 + c % 4) * 4 + row % 16 / 8 * 2;
    const float* at = tile + reg * kThreads + warp * 32 + row % 8 * 4;
    const float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + kThreads);
    x[0] = a.x, x[1] = b.x, x[2] = a.y, x[3] = b.y, x[4] = a.z, x[5] = b.z, x[6] = a.w, x[7] = b.w;
  }

  using Products = float[kNT][kMT][4];
  using KeySums = float[kNT][kDT][4];
  using Fragments = uint32_t[kNT][kKS][4];

  // Where a thread stands; made opaque in every iteration: hoisted out of the loop, addresses made of these would
  // spill.
  struct Lane {
    int wn, wm, g, t, l16, lh, l8, lb;
    __device__ __forceinline__ Lane(int warp, int lane)
        : wn(warp / 2),
          wm(warp % 2),
          g(lane / 4),
          t(lane % 4),
          l16(lane % 16),
          lh(lane / 16),
          l8(lane % 8),
          lb(lane / 8 % 2) {}
  };

  // acc += A B^T, both K-major; the fragments of the next k step are read before this one's products.
  static __device__ __forceinline__ void product(Products& acc, uint32_t a_tile, uint32_t b_tile, const Lane& l) {
    uint32_t a[2][kNT][4], b[2][kMT / 2][4];
    const auto read = [&](int kk) {
#pragma unroll
      for (int i = 0; i < kNT; i++)
        ptx::ldmatrix_x4(a[kk & 1][i], at_row(a_tile, l.wn * (Keys / 4) + i * 16 + l.l16, kk * 2 + l.lh));
#pragma unroll
      for (int j = 0; j < kMT / 2; j++)
        ptx::ldmatrix_x4(b[kk & 1][j], at_row(b_tile, l.wm * (Rows / 2) + j * 16 + l.l8 + l.lh * 8, kk * 2 + l.lb));
    };
    read(0);
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) {
      const int now = kk & 1;
      if (kk + 1 < D / 16) read(kk + 1);
#pragma unroll
      for (int j = 0; j < kMT / 2; j++)
#pragma unroll
        for (int i = 0; i < kNT; i++) {
          ptx::mma_m16n8k16<T>(acc[i][2 * j], a[now][i], b[now][j][0], b[now][j][1]);
          ptx::mma_m16n8k16<T>(acc[i][2 * j + 1], a[now][i], b[now][j][2], b[now][j][3]);
        }
    }
  }

  // acc += A B over this warp's half of the queries (A in registers), then over the other half (A from shared memory).
  static __device__ __forceinline__ void accumulate(KeySums& acc, const Fragments& own, uint32_t other, uint32_t b_tile,
                                                    const Lane& l) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int kk = 0; kk < kKS; kk++) {
        const int k0 = (half ? l.wm ^ 1 : l.wm) * (Rows / 2) + kk * 16;
        uint32_t a[kNT][4];
#pragma unroll
        for (int i = 0; i < kNT; i++) {
          if (half)
            ptx::ldmatrix_x4(a[i], at_col(other, l.wn * (Keys / 4) + i * 16 + l.l16, k0 / 8 + l.lh));
          else
#pragma unroll
            for (int e = 0; e < 4; e++) a[i][e] = own[i][kk][e];
        }
#pragma unroll
        for (int j = 0; j < kDT / 2; j++) {
          uint32_t b[4];
          ptx::ldmatrix_x4_trans(b, at_row(b_tile, k0 + l.l16, l.wm * (D / 16) + j * 2 + l.lh));
#pragma unroll
          for (int i = 0; i < kNT; i++) {
            ptx::mma_m16n8k16<T>(acc[i][2 * j], a[i], b[0], b[1]);
            ptx::mma_m16n8k16<T>(acc[i][2 * j + 1], a[i], b[2], b[3]);
          }
        }
      }
  }

  template <bool Ranged>
  static __device__ __forceinline__ void run(const BackwardTask& p) {
    const int tid = threadIdx.x;
    const BackwardTile where(p);
    const Sequence sequence = sequence_of(p, where.batch);
    BackwardQueries<Rows, Keys, Ranged> at(p, where, sequence);
    const int n0 = where.key_tile * Keys, total = at.per_head() * where.heads;
    const auto head_of = [&](const void* base, const Strides& s, int head) {
      return static_cast<const T*>(base) + where.batch * s.batch + head * s.head;
    };
    unsigned char* smem = ptx::dynamic_smem();
    const uint32_t base = ptx::smem_addr(smem);
    uint32_t sk = base, sv = sk + Keys * kRow;
    const uint32_t sq = sv + Keys * kRow, sdo = sq + 2 * kStage;
    uint32_t sp = sdo + 2 * kStage, sds = sp + Keys * kCol, stats = sds + Keys * kCol;

    const auto load = [&](int stage, int head, int tile) {
      load_tile<Rows>(sq + stage * kStage, head_of(p.query, p.query_strides, head), tile * Rows, sequence.q_len,
                      p.query_strides.row, p.head_dim);
      load_tile<Rows>(sdo + stage * kStage, head_of(p.grad_out, p.grad_out_strides, head), tile * Rows, sequence.q_len,
                      p.grad_out_strides.row, p.v_head_dim);
      if (tid < Rows / 2) {  // Rows / 4 chunks each of lse2 and delta
        const float* src = (tid < Rows / 4 ? p.lse2 : p.delta) + (int64_t(where.batch) * p.q_heads + head) * p.rows +
                           tile * Rows + tid % (Rows / 4) * 4;
        ptx::cp_async_16(stats + stage * kStats + tid * 16, src, true);
      }
      ptx::cp_async_commit();
    };

    KeySums dk = {}, dv = {};
    if (total > 0) {
      const int k_len = sequence.keys.key_length;
      load_tile<Keys>(sk, head_of(p.key, p.key_strides, where.head_k), n0, k_len, p.key_strides.row, p.head_dim);
      load_tile<Keys>(sv, head_of(p.value, p.value_strides, where.head_k), n0, k_len, p.value_strides.row,
                      p.v_head_dim);
      load(0, at.head, at.tile);
    }
    for (int it = 0; it < total; it++) {
      const int stage = it & 1, m0 = at.tile * Rows;
      const int64_t tile = (int64_t(where.batch) * p.q_heads + at.head) * at.tiles + at.tile;
      const int turn = Deterministic ? at.turn(where, sequence) : 0;
      const int warp = ptx::opaque(tid / 32);
      const Lane l(warp, ptx::opaque(tid % 32));
      sk = ptx::opaque(sk), sv = ptx::opaque(sv), sp = ptx::opaque(sp);
      sds = ptx::opaque(sds), stats = ptx::opaque(stats);
      const bool whole = at.whole(m0);
      ptx::cp_async_wait<0>();
      __syncthreads();  // this stage has landed; every warp is done with the other one and with P and dS
      at.next();
      if (it + 1 < total) load(stage ^ 1, at.head, at.tile);
      const uint32_t tq = sq + stage * kStage, tdo = sdo + stage * kStage;

      Products s = {}, dp = {};
      product(s, sk, tq, l);
      product(dp, sv, tdo, l);

      // Element e of tile (i, j): key n0 + wn Keys/4 + 16 i + g + 8 (e / 2), query m0 + wm Rows/2 + 8 j + 2 t + e % 2.
      if (!whole) {
#pragma unroll
        for (int i = 0; i < kNT; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int key = n0 + l.wn * (Keys / 4) + i * 16 + l.g + 8 * h, row = m0 + l.wm * (Rows / 2) + 2 * l.t;
            const KeyRows rows = Ranged ? key_rows_of(sequence, key) : KeyRows{0, key < p.kv_len ? p.rows : 0};
            const int begin = rows.begin - row, end = rows.end - row;
#pragma unroll
            for (int j = 0; j < kMT; j++)
#pragma unroll
              for (int e = 0; e < 2; e++) {
                const int x = j * 8 + e;
                if (x < begin || x >= end) s[i][j][2 * h + e] = -INFINITY;
              }
          }
      }
      const unsigned char* st = smem + (stats - base) + stage * kStats + (l.wm * (Rows / 2) + 4 * l.t) * 4;
      Fragments pf, df;
#pragma unroll
      for (int j = 0; j < kMT; j++) {
        const float4 lse4 = *reinterpret_cast<const float4*>(st + j / 2 * 64);
        const float4 delta4 = *reinterpret_cast<const float4*>(st + Rows * 4 + j / 2 * 64);
        const float2 lse = j % 2 ? float2{lse4.z, lse4.w} : float2{lse4.x, lse4.y};
        const float2 delta = j % 2 ? float2{delta4.z, delta4.w} : float2{delta4.x, delta4.y};
#pragma unroll
        for (int i = 0; i < kNT; i++) {
          float pr[4], ds[4];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            pr[e] = ptx::exp2(s[i][j][e] * p.scale_log2 - (e & 1 ? lse.y : lse.x));
            ds[e] = pr[e] * (dp[i][j][e] - (e & 1 ? delta.y : delta.x));
          }
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int r = l.wn * (Keys / 4) + i * 16 + l.g + 8 * h, c = l.wm * kMT + j;
            const uint32_t x = ptx::pack2<T>(pr[2 * h], pr[2 * h + 1]), y = ptx::pack2<T>(ds[2 * h], ds[2 * h + 1]);
            pf[i][j / 2][j % 2 * 2 + h] = x;
            df[i][j / 2][j % 2 * 2 + h] = y;
            *reinterpret_cast<uint32_t*>(smem + (at_col(sp, r, c) - base) + l.t * 4) = x;
            *reinterpret_cast<uint32_t*>(smem + (at_col(sds, r, c) - base) + l.t * 4) = y;
          }
        }
      }
      __syncthreads();  // P and dS are complete
      accumulate(dv, pf, sp, tdo, l);
      accumulate(dk, df, sds, tq, l);

      float dq[2][4][4] = {};
      const int qm = warp / kDqW * 32, qd = warp % kDqW * 4;  // first row, first 16-byte chunk of columns
#pragma unroll
      for (int kk = 0; kk < Keys / 16; kk++) {
        uint32_t a[2][4], b[4];
#pragma unroll
        for (int i = 0; i < 2; i++)
          ptx::ldmatrix_x4_trans(a[i], at_col(sds, kk * 16 + l.lh * 8 + l.l8, qm / 8 + i * 2 + l.lb));
#pragma unroll
        for (int j = 0; j < 2; j++) {
          ptx::ldmatrix_x4_trans(b, at_row(sk, kk * 16 + l.l16, qd + j * 2 + l.lh));
#pragma unroll
          for (int i = 0; i < 2; i++) {
            ptx::mma_m16n8k16<T>(dq[i][2 * j], a[i], b[0], b[1]);
            ptx::mma_m16n8k16<T>(dq[i][2 * j + 1], a[i], b[2], b[3]);
          }
        }
      }
      float* acc = p.query_sum + tile * (Rows * D) + tid;
      if (Deterministic) {
        if (tid == 0) ptx::turn_wait(p.turn + 2 * tile, turn);
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < 32; i++) ptx::reduce_add(acc + i * kThreads, dq[i / 16][i / 4 % 4][i % 4]);
      if (Deterministic) {
        ptx::thread_fence();
        __syncthreads();
        if (tid == 0) ptx::turn_pass(p.turn + 2 * tile, turn + 1);
      }
    }
    write(p, where, dk, dv, smem);
  }

  // dK and dV leave through the K and V tiles, so that global stores are whole 16-byte chunks.
  static __device__ __forceinline__ void write(const BackwardTask& p, const BackwardTile& where, const KeySums& dk,
                                               const KeySums& dv, unsigned char* smem) {
    const int tid = threadIdx.x, n0 = where.key_tile * Keys;
    const Lane l(tid / 32, tid % 32);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kNT; i++)
#pragma unroll
      for (int j = 0; j < kDT; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int r = l.wn * (Keys / 4) + i * 16 + l.g + 8 * h, c = l.wm * kDT + j;
          unsigned char* to = smem + at_row(0, r, c) + l.t * 4;
          *reinterpret_cast<uint32_t*>(to) = ptx::pack2<T>(dk[i][j][2 * h] * p.scale, dk[i][j][2 * h + 1] * p.scale);
          *reinterpret_cast<uint32_t*>(to + Keys * kRow) = ptx::pack2<T>(dv[i][j][2 * h], dv[i][j][2 * h + 1]);
        }
    __syncthreads();
    const auto head_of = [&](void* base, const Strides& s) {
      return static_cast<T*>(base) + where.batch * s.batch + where.head_k * s.head;
    };
    T* out_k = p.grad_key ? head_of(p.grad_key, p.grad_key_strides) : nullptr;
    T* out_v = p.grad_value ? head_of(p.grad_value, p.grad_value_strides) : nullptr;
#pragma unroll
    for (int i = 0; i < Keys * (D / 8) / kThreads; i++) {
      const int c = i * kThreads + tid, row = c / (D / 8), chunk = c % (D / 8);
      if (n0 + row >= p.kv_len) continue;
      const unsigned char* from = smem + at_row(0, row, chunk);
      if (out_k && chunk * 8 < p.head_dim)
        *reinterpret_cast<uint4*>(out_k + (n0 + row) * p.grad_key_strides.row + chunk * 8) =
            *reinterpret_cast<const uint4*>(from);
      if (out_v && chunk * 8 < p.v_head_dim)
        *reinterpret_cast<uint4*>(out_v + (n0 + row) * p.grad_value_strides.row + chunk * 8) =
            *reinterpret_cast<const uint4*>(from + Keys * kRow);
    }
  }
};

// grid: key_tiles * kv_heads * batch
template <class Kernel, bool Ranged>
__global__ void __launch_bounds__(Kernel::kThreads, 1) sm80_backward(const __grid_constant__ BackwardTask p) {
  Kernel::template run<Ranged>(p);
}

}  // namespace attnjourney
