// Attention backward on mma.sync, for every GPU from Ampere on (FlashAttention-2, arXiv 2307.08691). One block: Keys
// keys of one key head, all query tiles of all its query heads. S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are
// already A operands of dV += P^T dO and dK += dS^T Q. Eight warps: S^T 4 (keys) x 2 (queries); dK, dV 4 (keys) x 2
// (columns); dQ 32 x 32 a warp.
#pragma once
#include "cuda/kernels/common/backward_passes.cuh"
#include "cuda/kernels/common/scores.cuh"
#include "cuda/kernels/common/slope_sum.cuh"

namespace attnjourney {

// Options: as in sm80/forward.cuh, in tiles of at most 32 scores a thread. OutStages: of dO; with one, which fits into
// 99 KB, the next tile is fetched when this one's dV is done.
template <class T_, int D, int Rows, int Keys, bool Deterministic, bool Options = false, int OutStages = 2>
struct Sm80Backward {
  using T = T_;
  static constexpr int kRows = Rows, kKeys = Keys, kD = D, kThreads = Keys < 64 ? 128 : 256, kRow = D * 2,
                       kCol = Rows * 2;
  static constexpr int kWarps = kThreads / 32, kWarpKeys = Keys / (kWarps / 2), kNT = kWarpKeys / 16;  // 16-key tiles
  static constexpr int kMT = Rows / 16,
                       kKS = Rows / 32;  // 8-query tiles of a warp's Rows / 2 queries, 16-steps in them
  static constexpr int kDT = D / 16;     // 8-column tiles of a warp's D / 2 columns
  static constexpr int kDqW = D / 32;    // parts of 32 x 32 along D in dQ
  static constexpr int kParts = 8;       // of dQ
  static constexpr int kStage = Rows * kRow, kStats = Rows * 8;
  static constexpr int kTileBytes = 2 * Keys * kRow + (2 + OutStages) * kStage + 2 * Keys * kCol + 2 * kStats;
  using Window = TileWindow<kThreads>;
  static constexpr int kSmemBytes = kTileBytes + (Options ? Window::kBytes + kWarps * 4 : 0);
  static constexpr bool kOptions = Options;
  static_assert(Rows * D == kParts * 1024 && kParts % kWarps == 0);
  using Fragment = KeyFragment<kNT, kMT>;

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
    const int part = row / 32 * kDqW + c / 4, reg = (row % 32 / 16 * 4 + c % 4) * 4 + row % 16 / 8 * 2;
    const float* at = tile + (reg * kParts + part) * 32 + row % 8 * 4;
    const float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + kParts * 32);
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

  // of element 0 of a fragment, in its tile
  static __device__ __forceinline__ int own_key(const Lane& l) { return l.wn * kWarpKeys + l.g; }
  static __device__ __forceinline__ int own_row(const Lane& l) { return l.wm * (Rows / 2) + 2 * l.t; }

  // acc += A B^T, both K-major; the fragments of the next k step are read before this one's products.
  static __device__ __forceinline__ void product(Products& acc, uint32_t a_tile, uint32_t b_tile, const Lane& l) {
    uint32_t a[2][kNT][4], b[2][kMT / 2][4];
    const auto read = [&](int kk) {
#pragma unroll
      for (int i = 0; i < kNT; i++)
        ptx::ldmatrix_x4(a[kk & 1][i], at_row(a_tile, l.wn * kWarpKeys + i * 16 + l.l16, kk * 2 + l.lh));
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

  // This warp's keys of 16 queries from k0 on, of P or dS
  static __device__ __forceinline__ void read_keys(uint32_t (&a)[kNT][4], uint32_t tile, int k0, const Lane& l) {
#pragma unroll
    for (int i = 0; i < kNT; i++)
      ptx::ldmatrix_x4(a[i], at_col(tile, l.wn * kWarpKeys + i * 16 + l.l16, k0 / 8 + l.lh));
  }
  // acc += A B for these 16 queries
  template <bool Guarded>
  static __device__ __forceinline__ void accumulate_step(KeySums& acc, const uint32_t (&a)[kNT][4], uint32_t b_tile,
                                                         int k0, const Lane& l) {
#pragma unroll
    for (int j = 0; j < kDT / 2; j++) {
      uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, at_row(b_tile, k0 + l.l16, l.wm * (D / 16) + j * 2 + l.lh));
#pragma unroll
      for (int i = 0; i < kNT; i++) {
        const auto mma = Guarded ? guarded_mma<T> : pair_mma<T>;
        mma(acc[i][2 * j], acc[i][2 * j + 1], a[i], b);
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
        if (half)
          read_keys(a, other, k0, l);
        else
#pragma unroll
          for (int i = 0; i < 4 * kNT; i++) a[i / 4][i % 4] = own[i / 4][kk][i % 4];
        accumulate_step<false>(acc, a, b_tile, k0, l);
      }
  }
  // The same where B may hold numbers that are not finite: rare, so all of A from shared memory, a step at a time.
  static __device__ __forceinline__ void accumulate_guarded(KeySums& acc, uint32_t a_tile, uint32_t b_tile,
                                                            const Lane& l) {
#pragma unroll 1
    for (int k0 = 0; k0 < Rows; k0 += 16) {
      uint32_t a[kNT][4];
      read_keys(a, a_tile, k0, l);
      accumulate_step<true>(acc, a, b_tile, k0, l);
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
      ptx::ldmatrix_x4_trans(b, at_row(tile, i / (Chunks / 2) * 16 + l.l16, chunk + i % (Chunks / 2) * 2 + l.lh));
      good = good && all_finite<T>(b);
    }
    return !ptx::any(!good);
  }
  template <bool Guarded>
  static __device__ __forceinline__ void query_product(float (&dq)[2][4][4], uint32_t sds, uint32_t sk, int qm, int qd,
                                                       const Lane& l) {
#pragma unroll(Guarded ? 1 : Keys / 16)
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
          const auto mma = Guarded ? guarded_mma<T> : pair_mma<T>;
          mma(dq[i][2 * j], dq[i][2 * j + 1], a[i], b);
        }
      }
    }
  }

  template <bool Ranged>
  static __device__ __forceinline__ void run(const BackwardTask& p) {
    const int tid = threadIdx.x;
    const BackwardTile where = Options && p.cu_q ? BackwardTile(p, blockIdx.x, Keys) : BackwardTile(p, blockIdx.x);
    const Sequence sequence = sequence_of<Options>(p, where.batch);
    if (Options && where.key_tile * Keys >= sequence.k_rows) return;
    BackwardQueries<Rows, Keys, Ranged> at(p, where, sequence);
    const int n0 = where.key_tile * Keys, total = at.per_head() * where.heads;
    const auto head_of = [&](const void* base, const Strides& s, int head, int begin) {
      return static_cast<const T*>(base) + where.batch * s.batch + head * s.head + begin * s.row;
    };
    const auto scratch_of = [&](int head) {
      return Options ? scratch_row(p, where.batch, head) : (int64_t(where.batch) * p.q_heads + head) * p.rows;
    };
    unsigned char* smem = ptx::dynamic_smem();
    const uint32_t base = ptx::smem_addr(smem);
    uint32_t sk = base, sv = sk + Keys * kRow;
    const uint32_t sq = sv + Keys * kRow, sdo = sq + 2 * kStage;
    uint32_t sp = sdo + OutStages * kStage, sds = sp + Keys * kCol, stats = sds + Keys * kCol;

    const auto load_out = [&](int stage, int head, int tile) {
      load_tile<Rows>(sdo + (OutStages == 2 ? stage : 0) * kStage,
                      head_of(p.grad_out, p.grad_out_strides, head, sequence.q_begin), tile * Rows, sequence.q_len,
                      p.grad_out_strides.row, p.v_head_dim);
      if (OutStages == 1) ptx::cp_async_commit();
    };
    const auto load = [&](int stage, int head, int tile) {
      load_tile<Rows>(sq + stage * kStage, head_of(p.query, p.query_strides, head, sequence.q_begin), tile * Rows,
                      sequence.q_len, p.query_strides.row, p.head_dim);
      if (OutStages == 2) load_out(stage, head, tile);
      if (const int i = ptx::opaque(threadIdx.x); i < Rows / 2) {  // Rows / 4 chunks each of lse2 and delta
        const float* src = (i < Rows / 4 ? p.lse2 : p.delta) + scratch_of(head) + tile * Rows + i % (Rows / 4) * 4;
        ptx::cp_async_16(stats + stage * kStats + i * 16, src, true);
      }
      ptx::cp_async_commit();
    };

    // Options: which of its scores of the tile to come a thread's rows see; tiles in which a boolean mask or one of
    // blocks hides all are left out, but for passing on the turn that others wait for.
    uint32_t seen = 0;
    bool hides = false;
    int flag = 0;
    Window window{reinterpret_cast<uint32_t*>(smem + kTileBytes)};
    const auto pass_turn = [&] {
      if (tid != 0) return;
      int* turn = p.turn + 2 * (scratch_of(at.head) / Rows + at.tile);
      // once more where holding it would spill
      const int mine = at.turn(where, D == 128 ? sequence_of<Options>(p, where.batch) : sequence);
      ptx::turn_wait(turn, mine);
      ptx::turn_pass(turn, mine + 1);
    };
    const auto next_seen = [&](int it) {
      const bool blocks = p.scores.mask_kind == MaskElement::blocks;
      for (; Options && it < total; it++, at.next()) {
        if (blocks) {
          const int to = window.next(it, total, [&](int i) {
            auto other = at;
            other.go(i, where.first_head);
            const HeadScores scores(p, p.q_heads, where.batch, other.head);
            return scores.blocks(p.scores).kind(other.tile * Rows, Rows, n0, min(Keys, p.kv_len - n0));
          });
          if (Deterministic)
            for (; it < to; it++, at.next()) pass_turn();
          else if (to > it)
            at.go(it = to, where.first_head);
          if (it == total) break;
        }
        const int m0 = at.tile * Rows;
        constexpr bool kOpaque = D == 64 || (D == 256 && Deterministic);  // where the other way spills
        const Lane l(kOpaque ? ptx::opaque(tid / 32) : tid / 32, kOpaque ? ptx::opaque(tid % 32) : tid % 32);
        const int row = m0 + own_row(l), key = n0 + own_key(l);
        const bool whole = at.whole(m0) && m0 + Rows <= sequence.rows, some_blocks = blocks && !window.whole(it);
        seen = whole ? kAllSeen<Fragment> : seen_in_range<Fragment>(sequence, row, key);
        hides = !whole || some_blocks || p.scores.mask_kind >= MaskElement::boolean;
        if (p.scores.mask_kind != MaskElement::boolean && !some_blocks) break;
        const HeadScores scores(p, p.q_heads, where.batch, at.head);
        if (some_blocks) {
          seen = seen_in_blocks<Fragment>(scores.blocks(p.scores), row, key, tid % 32, seen);
          break;
        }
        seen = seen_in_mask<Fragment>(p.scores, scores, row, key, seen);
        if (block_any(seen != 0, window.found, flag, kWarps)) break;
        if (Deterministic) pass_turn();
      }
      return it;
    };

    KeySums dk = {}, dv = {};
    float slope_sum = 0.f;
    const int first = next_seen(0);
    if (first < total) {
      const int k_len = sequence.keys.key_length;
      load_tile<Keys>(sk, head_of(p.key, p.key_strides, where.head_k, sequence.k_begin), n0, k_len, p.key_strides.row,
                      p.head_dim);
      load_tile<Keys>(sv, head_of(p.value, p.value_strides, where.head_k, sequence.k_begin), n0, k_len,
                      p.value_strides.row, p.v_head_dim);
      load(0, at.head, at.tile);
      if (OutStages == 1) load_out(0, at.head, at.tile);
    }
    int stage = 1;
    for (int it = first, next; it < total; it = next) {
      const int m0 = at.tile * Rows, head = at.head;
      stage ^= 1;
      const int64_t tile = scratch_of(at.head) / Rows + at.tile;
      int turn = 0;  // with options in shared memory, where thread 0 alone looks at it: a register less to hold
      int* const held_turn = reinterpret_cast<int*>(smem + kTileBytes + Window::kBytes);
      if (Deterministic && !Options) turn = at.turn(where, sequence);
      if (Deterministic && Options && tid == 0) *held_turn = at.turn(where, sequence);
      const int warp = ptx::opaque(tid / 32);
      const Lane l(warp, ptx::opaque(tid % 32));
      sk = ptx::opaque(sk), sv = ptx::opaque(sv), sp = ptx::opaque(sp);
      sds = ptx::opaque(sds), stats = ptx::opaque(stats);
      const bool whole = at.whole(m0), border = Options ? hides : !whole;
      const uint32_t here = seen;
      ptx::cp_async_wait<0>();
      __syncthreads();  // @stage_landed: every warp is done with the other one and with P and dS
      at.next();
      next = next_seen(it + 1);
      if (next < total) load(stage ^ 1, at.head, at.tile);
      const uint32_t tq = sq + stage * kStage, tdo = sdo + (OutStages == 2 ? stage : 0) * kStage;

      Products s = {}, dp = {};
      product(s, sk, tq, l);
      product(dp, sv, tdo, l);

      // Element e of tile (i, j): key n0 + wn Keys/4 + 16 i + g + 8 (e / 2), query m0 + wm Rows/2 + 8 j + 2 t + e % 2.
      if (!Options && !whole) {
#pragma unroll
        for (int i = 0; i < kNT; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int key = n0 + l.wn * kWarpKeys + i * 16 + l.g + 8 * h, row = m0 + l.wm * (Rows / 2) + 2 * l.t;
            const Range rows = Ranged ? key_rows_of(sequence, key) : Range{0, key < p.kv_len ? p.rows : 0};
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
      const HeadScores scores(p, p.q_heads, where.batch, head);
      const OptionScores option{p, scores, sequence, m0 + own_row(l), n0 + own_key(l), here};
      const uint32_t bits = Options && p.scores.seed ? option.kept_bits() : ~0u;
      const auto fresh = [&] { return Lane(ptx::opaque(tid / 32), ptx::opaque(tid % 32)); };
      const auto weigh = [&]<class Guarded>(Guarded) {
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
              if constexpr (Options) {
                option.element((i * kMT + j) * 4 + e, bits, s[i][j][e], dp[i][j][e], e & 1 ? lse.y : lse.x,
                               e & 1 ? delta.y : delta.x, pr[e], ds[e], slope_sum);
              } else {
                pr[e] = ptx::exp2(s[i][j][e] * p.scale_log2 - (e & 1 ? lse.y : lse.x));
                ds[e] = pr[e] * (dp[i][j][e] - (e & 1 ? delta.y : delta.x));
                if (Guarded::value && pr[e] == 0.f) ds[e] = 0.f;
              }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const int r = l.wn * kWarpKeys + i * 16 + l.g + 8 * h, c = l.wm * kMT + j;
              const uint32_t x = ptx::pack2<T>(pr[2 * h], pr[2 * h + 1]), y = ptx::pack2<T>(ds[2 * h], ds[2 * h + 1]);
              pf[i][j / 2][j % 2 * 2 + h] = x;
              df[i][j / 2][j % 2 * 2 + h] = y;
              *reinterpret_cast<uint32_t*>(smem + (at_col(sp, r, c) - base) + l.t * 4) = x;
              *reinterpret_cast<uint32_t*>(smem + (at_col(sds, r, c) - base) + l.t * 4) = y;
            }
          }
        }
      };
      constexpr bool kGuard = Ranged && !Options;  // where nothing is hidden, no number has to be kept from leaking
      if (kGuard && border)
        weigh(std::bool_constant<kGuard>{});
      else
        weigh(std::false_type{});
      __syncthreads();  // @scores_complete: P and dS
      if (!Ranged || !border || finite<Rows, D / 16>(tdo, l.wm * (D / 16), fresh()))
        accumulate(dv, pf, sp, tdo, l);
      else
        accumulate_guarded(dv, sp, tdo, fresh());
      if (OutStages == 1) {
        __syncthreads();  // @grad_out_read: by every warp
        if (next < total) load_out(0, at.head, at.tile);
      }
      if (!Ranged || !border || finite<Rows, D / 16>(tq, l.wm * (D / 16), fresh()))
        accumulate(dk, df, sds, tq, l);
      else
        accumulate_guarded(dk, sds, tq, fresh());

#pragma unroll 1
      for (int i = 0; i < kParts / kWarps; i++) {
        const int part = warp + i * kWarps;
        float dq[2][4][4] = {};
        const int qm = part / kDqW * 32, qd = part % kDqW * 4;  // first row, first 16-byte chunk of columns
        if (!Ranged || !border || finite<Keys, 4>(sk, qd, fresh()))
          query_product<false>(dq, sds, sk, qm, qd, kWarps < kParts ? fresh() : l);  // held over the loop would spill
        else
          query_product<true>(dq, sds, sk, qm, qd, fresh());
        float* acc = p.query_sum + tile * (Rows * D) + tid + i * kThreads;
        if (Deterministic && i == 0) {
          if (tid == 0) ptx::turn_wait(p.turn + 2 * tile, Options ? *held_turn : turn);
          __syncthreads();
        }
#pragma unroll
        for (int e = 0; e < 32; e++) ptx::reduce_add(acc + e * kParts * 32, dq[e / 16][e / 4 % 4][e % 4]);
      }
      if (Deterministic) {
        ptx::thread_fence();
        __syncthreads();
        if (tid == 0) ptx::turn_pass(p.turn + 2 * tile, (Options ? *held_turn : turn) + 1);
      }
      if (Options && p.slope_sum && (next >= total || at.head != head)) {
        add_slopes<Keys, kWarps>(p, where, head, slope_sum,
                                 reinterpret_cast<float*>(smem + kTileBytes + Window::kBytes));
        slope_sum = 0.f;
      }
    }
    write(p, where, sequence, dk, dv, smem);
  }

  // Options: one score of a thread, from the products q . k and dO . v to its weight and its part of dS.
  struct OptionScores {
    const BackwardTask& p;
    const HeadScores& h;
    const Sequence& sequence;
    int row, key;  // of element 0
    uint32_t seen;
    __device__ __forceinline__ uint32_t kept_bits() const {
      return kept(p.scores, h, row, key, threadIdx.x % 32, Fragment{});
    }
    __device__ __forceinline__ void element(int i, uint32_t bits, float product, float grad, float lse, float delta,
                                            float& weight, float& grad_product, float& slope_sum) const {
      const int r = row + Fragment::row(i), k = key + Fragment::key(i);
      const WeightedScore x = weighted<T>(p.scores, h, r, k, sequence.keys.offset, seen >> i & 1, bits >> i & 1,
                                          product, p.scale_log2, lse, grad, delta);
      if (p.slope_sum) slope_sum -= x.grad * distance(r, k, sequence.keys.offset);
      weight = bits >> i & 1 ? x.weight : 0.f;
      grad_product = x.grad * x.slope;
    }
  };

  // dK and dV leave through the K and V tiles, so that global stores are whole 16-byte chunks.
  static __device__ __forceinline__ void write(const BackwardTask& p, const BackwardTile& where, const Sequence& held,
                                               const KeySums& dk, const KeySums& dv, unsigned char* smem) {
    const int tid = threadIdx.x, n0 = where.key_tile * Keys;
    const Lane l(tid / 32, tid % 32);
    // once more where holding it through the loop would spill
    const Sequence sequence = Deterministic || D == 256 ? held : sequence_of<Options>(p, where.batch);
    const float value_scale = Options && p.scores.seed ? p.scores.keep_scale : 1.f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kNT; i++)
#pragma unroll
      for (int j = 0; j < kDT; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int r = l.wn * kWarpKeys + i * 16 + l.g + 8 * h, c = l.wm * kDT + j;
          unsigned char* to = smem + at_row(0, r, c) + l.t * 4;
          *reinterpret_cast<uint32_t*>(to) = ptx::pack2<T>(dk[i][j][2 * h] * p.scale, dk[i][j][2 * h + 1] * p.scale);
          *reinterpret_cast<uint32_t*>(to + Keys * kRow) =
              ptx::pack2<T>(dv[i][j][2 * h] * value_scale, dv[i][j][2 * h + 1] * value_scale);
        }
    __syncthreads();
    const auto head_of = [&](void* base, const Strides& s) {
      return static_cast<T*>(base) + where.batch * s.batch + where.head_k * s.head + sequence.k_begin * s.row;
    };
    T* out_k = p.grad_key ? head_of(p.grad_key, p.grad_key_strides) : nullptr;
    T* out_v = p.grad_value ? head_of(p.grad_value, p.grad_value_strides) : nullptr;
#pragma unroll
    for (int i = 0; i < Keys * (D / 8) / kThreads; i++) {
      const int c = i * kThreads + tid, row = c / (D / 8), chunk = c % (D / 8);
      if (n0 + row >= sequence.k_rows) continue;
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

// where shared memory is small: with options, for plain calls too
template <class T, int D, bool Deterministic>
using Sm80BackwardSmall = Sm80Backward<T, D, 8192 / D, D == 256 ? 32 : 64, Deterministic, true, 1>;

// grid: key_tiles * kv_heads * batch
template <class Kernel, bool Ranged>
__global__ void __launch_bounds__(Kernel::kThreads, 1) sm80_backward(const __grid_constant__ BackwardTask p) {
  Kernel::template run<Ranged>(p);
}

}  // namespace attnjourney
