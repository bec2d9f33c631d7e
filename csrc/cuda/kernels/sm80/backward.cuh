// Attention backward on mma.sync, for every GPU from Ampere on (FlashAttention-2, arXiv 2307.08691). One block: Keys
// keys of one key head, all query tiles of all its query heads. S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are
// already A operands of dV += P^T dO and dK += dS^T Q. Eight warps, four with 32 keys: half as many along the keys of
// S^T, dK and dV, two along the queries of S^T and the columns of dK and dV; parts of 32 x 32 of dQ in turn.
#pragma once
#include "backward_tiles.cuh"
#include "cuda/kernels/common/backward_passes.cuh"
#include "cuda/kernels/common/next_tile.cuh"
#include "cuda/kernels/common/slope_sum.cuh"

namespace attnjourney {

// Options: as in sm80/forward.cuh, in tiles of at most 32 scores a thread. OutStages: of dO; with one, which fits into
// 99 KB, the next tile is fetched when this one's dV is done.
template <class T_, int D, int Rows, int Keys, bool Deterministic, bool Options = false, int OutStages = 2>
struct Sm80Backward : Sm80BackwardTiles<T_, D, Rows, Keys> {
  using T = T_;
  using Tiles = Sm80BackwardTiles<T, D, Rows, Keys>;
  using Tiles::kKeyTiles, Tiles::kRowTiles, Tiles::kColumnTiles, Tiles::at_row, Tiles::at_col;
  using Tiles::kThreads, Tiles::kWarps, Tiles::kRow, Tiles::kColumn, Tiles::kWarpKeys, Tiles::kParts;
  using typename Tiles::Lane, typename Tiles::Scores, typename Tiles::KeySums, typename Tiles::Operands;
  static constexpr int kRows = Rows, kKeys = Keys, kD = D;
  // with options a row has three statistics; the third is read from the scratch where it would not fit into 99 KB
  static constexpr bool kInverseStaged = Options && (D > 64 || OutStages == 2);
  static constexpr int kStage = Rows * kRow, kStats = Rows * (kInverseStaged ? 12 : 8);
  static constexpr int kTileBytes = 2 * Keys * kRow + (2 + OutStages) * kStage + 2 * Keys * kColumn + 2 * kStats;
  using Window = TileWindow<kThreads>;
  static constexpr int kSmemBytes = kTileBytes + (Options ? Window::kBytes + kWarps * 4 : 0);
  static constexpr bool kOptions = Options, kRecompute = D == 128;  // see QueryTileWalk
  static __device__ __forceinline__ bool takes_turns(const BackwardTask&) { return Deterministic; }
  using Fragment = KeyFragment<kKeyTiles, kRowTiles>;

  // Options: one score of a thread, from the products q . k and dO . v to its weight and its part of dS.
  struct OptionScores {
    const BackwardTask& p;
    const HeadScores& head;
    const Sequence& sequence;
    int first_row, first_key;  // of element 0
    uint32_t seen;
    __device__ __forceinline__ uint32_t kept_bits() const {
      return kept(p.scores, head, first_row, first_key, threadIdx.x % 32, Fragment{});
    }
    __device__ __forceinline__ void element(int i, uint32_t bits, float product, float grad,
                                            const RowStats<float>& stats, float delta, float& weight,
                                            float& grad_product, float& slope_sum) const {
      const int row = first_row + Fragment::row(i), key = first_key + Fragment::key(i);
      const WeightedScore x = weighted<T>(p.scores, head, row, key, sequence.keys.offset, seen >> i & 1, bits >> i & 1,
                                          product, p.score_scale, stats, grad, delta);
      if (p.slope_sum) slope_sum -= x.grad * distance(row, key, sequence.keys.offset);
      weight = bits >> i & 1 ? x.weight : 0.f;
      grad_product = x.grad * x.slope;
    }
  };

  // What a block of the grid works on, and where it lies in shared memory. It walks over the query tiles that its keys
  // see (next_tile.cuh).
  template <bool Ranged>
  struct Block : QueryTileWalk<Sm80Backward, Ranged, float> {
    using Walk = QueryTileWalk<Sm80Backward, Ranged, float>;
    using Walk::p, Walk::where, Walk::held, Walk::at, Walk::first_key, Walk::total, Walk::scratch_of;
    unsigned char* const smem;
    const uint32_t base;
    uint32_t key_tile, value_tile;
    const uint32_t query_stages, grad_out_stages;
    uint32_t weight_tile, score_grad_tile, stats;
    VisibleTile found;  // of the tile to come
    int flags_turn = 0;
    Window window;
    KeySums dk = {}, dv = {};
    float slope_sum = 0.f;

    explicit __device__ __forceinline__ Block(const BackwardTask& p_)
        : Walk(p_, blockIdx.x),
          smem(ptx::dynamic_smem()),
          base(ptx::smem_addr(smem)),
          key_tile(base),
          value_tile(key_tile + Keys * kRow),
          query_stages(value_tile + Keys * kRow),
          grad_out_stages(query_stages + 2 * kStage),
          weight_tile(grad_out_stages + OutStages * kStage),
          score_grad_tile(weight_tile + Keys * kColumn),
          stats(score_grad_tile + Keys * kColumn),
          window{reinterpret_cast<uint32_t*>(smem + kTileBytes)} {}

    static __device__ __forceinline__ Lane fresh_lane() {
      return Lane(ptx::opaque(threadIdx.x / 32), ptx::opaque(threadIdx.x % 32));
    }

    // ---- loads ----

    __device__ __forceinline__ const T* head_of(const void* tensor, const Strides& s, int head, int begin) const {
      return static_cast<const T*>(tensor) + where.batch * s.batch + head * s.head + begin * s.row;
    }
    __device__ __forceinline__ void load_keys() const {
      const int length = held.keys.key_length;
      Tiles::template load_tile<Keys>(key_tile, head_of(p.key, p.key_strides, where.head_k, held.k_begin), first_key,
                                      length, p.key_strides.row, p.head_dim);
      Tiles::template load_tile<Keys>(value_tile, head_of(p.value, p.value_strides, where.head_k, held.k_begin),
                                      first_key, length, p.value_strides.row, p.v_head_dim);
    }
    __device__ __forceinline__ void load_grad_out(int stage) const {
      Tiles::template load_tile<Rows>(grad_out_stages + (OutStages == 2 ? stage : 0) * kStage,
                                      head_of(p.grad_out, p.grad_out_strides, at.head, held.q_begin), at.tile * Rows,
                                      held.q_len, p.grad_out_strides.row, p.v_head_dim);
      if (OutStages == 1) ptx::cp_async_commit();
    }
    __device__ __forceinline__ void load(int stage) const {
      Tiles::template load_tile<Rows>(query_stages + stage * kStage,
                                      head_of(p.query, p.query_strides, at.head, held.q_begin), at.tile * Rows,
                                      held.q_len, p.query_strides.row, p.head_dim);
      if (OutStages == 2) load_grad_out(stage);
      constexpr int kChunks = Rows / 4;
      if (const int i = ptx::opaque(threadIdx.x); i < kStats / 16) {  // lse2, delta; with options reference, inverse
        const float* of = Options ? (i < kChunks       ? p.reference
                                     : i < 2 * kChunks ? p.delta
                                                       : p.inverse)
                                  : (i < kChunks ? p.lse2 : p.delta);
        ptx::cp_async_16(stats + stage * kStats + i * 16, of + scratch_of(at.head) + at.tile * Rows + i % kChunks * 4,
                         true);
      }
      ptx::cp_async_commit();
    }

    // ---- the walk ----

    __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
    __device__ __forceinline__ const Sequence& sequence() const { return held; }
    __device__ __forceinline__ TilePlace place(int, const Sequence& sequence) const {
      constexpr bool kOpaque = D == 64 || (D == 256 && Deterministic);  // where the other way spills
      const int warp = threadIdx.x / 32, first_row = at.tile * Rows;
      const Lane l(kOpaque ? ptx::opaque(warp) : warp, kOpaque ? ptx::opaque(lane()) : lane());
      return {first_row + l.row(), first_key + l.key(), at.whole(first_row) && first_row + Rows <= sequence.rows};
    }
    __device__ __forceinline__ int next_visible(int n) {
      if (!Options) return n;
      return next_visible_tile<Fragment, kWarps>(n, found, p.scores, *this, window, window.found, flags_turn);
    }

    // ---- a tile ----

    // -inf for what key ranges hide. Element e of tile (i, j): key first_key + kWarpKeys key_warp + 16 i + group +
    // 8 (e / 2), query first_row + Rows / 2 row_warp + 8 j + 2 member + e % 2.
    __device__ __forceinline__ void hide(Scores& s, int first_row, const Lane& l) const {
#pragma unroll
      for (int i = 0; i < kKeyTiles; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int key = first_key + l.key() + i * 16 + 8 * h, row = first_row + l.row();
          const Range rows = Ranged ? key_rows_of(held, key) : Range{0, key < p.kv_len ? p.rows : 0};
          const int begin = rows.begin - row, end = rows.end - row;
#pragma unroll
          for (int j = 0; j < kRowTiles; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const int x = j * 8 + e;
              if (x < begin || x >= end) s[i][j][2 * h + e] = -INFINITY;
            }
        }
    }

    // Without options: is a row of the tile whose lse2 this is far?
    static __device__ __forceinline__ bool any_far(const unsigned char* lse2) {
      bool far = false;
#pragma unroll
      for (int i = 0; i < Rows / 32; i++)
        far = far || is_far(reinterpret_cast<const float*>(lse2)[i * 32 + threadIdx.x % 32]);
      return ptx::any(far);
    }

    // The softmax epilogue: products q . k and dO . v to weights and dS, as operands and in shared memory. Guarded: a
    // weight of 0 stands for a pair that is not seen. Far: rows are, and their statistics are read from the scratch, of
    // which this thread's first one is number `far_row`.
    template <bool Guarded, bool Far>
    __device__ __forceinline__ void softmax(Operands& weights, Operands& score_grads, const Scores& s, const Scores& dp,
                                            const OptionScores& option, uint32_t bits, const unsigned char* tile_stats,
                                            int64_t far_row, const Lane& l) {
      const auto pair = [](const void* at, int j) {
        const float4 four = *reinterpret_cast<const float4*>(static_cast<const unsigned char*>(at) + j / 2 * 64);
        return j % 2 ? float2{four.z, four.w} : float2{four.x, four.y};
      };
#pragma unroll
      for (int j = 0; j < kRowTiles; j++) {
        const float2 reference = Far ? pair(p.reference + far_row, j) : pair(tile_stats, j);
        const float2 inverse = Far || (Options && !kInverseStaged) ? pair(p.inverse + far_row, j)
                               : Options                           ? pair(tile_stats + Rows * 8, j)
                                                                   : float2{1.f, 1.f};
        const float2 delta = pair(tile_stats + Rows * 4, j);
#pragma unroll
        for (int i = 0; i < kKeyTiles; i++) {
          float weight[4], ds[4];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const RowStats<float> row{e & 1 ? reference.y : reference.x, e & 1 ? inverse.y : inverse.x};
            const float row_delta = e & 1 ? delta.y : delta.x;
            if constexpr (Options) {
              option.element((i * kRowTiles + j) * 4 + e, bits, s[i][j][e], dp[i][j][e], row, row_delta, weight[e],
                             ds[e], slope_sum);
            } else {
              weight[e] = Far ? ptx::exp2(ptx::rounded_product(s[i][j][e], p.score_scale) - row.reference) * row.inverse
                              : ptx::exp2(ptx::fma(s[i][j][e], p.score_scale, -row.reference));
              ds[e] = weight[e] * (dp[i][j][e] - row_delta);
              if (Guarded && weight[e] == 0.f) ds[e] = 0.f;
            }
          }
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int row = l.key() + i * 16 + 8 * h, chunk = l.row_warp * kRowTiles + j;
            const uint32_t x = ptx::pack2<T>(weight[2 * h], weight[2 * h + 1]),
                           y = ptx::pack2<T>(ds[2 * h], ds[2 * h + 1]);
            weights[i][j / 2][j % 2 * 2 + h] = x;
            score_grads[i][j / 2][j % 2 * 2 + h] = y;
            *reinterpret_cast<uint32_t*>(smem + (at_col(weight_tile, row, chunk) - base) + l.member * 4) = x;
            *reinterpret_cast<uint32_t*>(smem + (at_col(score_grad_tile, row, chunk) - base) + l.member * 4) = y;
          }
        }
      }
    }

    // dQ of a tile, `tile` among those of the scratch: added to query_sum, with turns in the order of the blocks.
    __device__ __forceinline__ void add_query(int64_t tile, bool border, int turn, const int* held_turn, int warp,
                                              const Lane& l) const {
      const int tid = threadIdx.x;
#pragma unroll 1
      for (int i = 0; i < kParts / kWarps; i++) {
        const int part = warp + i * kWarps;
        float dq[2][4][4] = {};
        const int row = part / Tiles::kQueryParts * 32, chunk = part % Tiles::kQueryParts * 4;  // the first ones
        if (!Ranged || !border || Tiles::template finite<Keys, 4>(key_tile, chunk, fresh_lane()))
          Tiles::template query_product<false>(dq, score_grad_tile, key_tile, row, chunk,
                                               kWarps < kParts ? fresh_lane() : l);  // held over the loop would spill
        else
          Tiles::template query_product<true>(dq, score_grad_tile, key_tile, row, chunk, fresh_lane());
        float* sum = p.query_sum + tile * (Rows * D) + tid + i * kThreads;
        if (Deterministic && i == 0) {
          if (tid == 0) ptx::turn_wait(p.turn + 2 * tile, Options ? *held_turn : turn);
          __syncthreads();
        }
#pragma unroll
        for (int e = 0; e < 32; e++) ptx::reduce_add(sum + e * kParts * 32, dq[e / 16][e / 4 % 4][e % 4]);
      }
      if (Deterministic) {
        ptx::thread_fence();
        __syncthreads();
        if (tid == 0) ptx::turn_pass(p.turn + 2 * tile, (Options ? *held_turn : turn) + 1);
      }
    }

    // Works on tile n, which lies in this stage or is on its way there; returns the number of the next one.
    __device__ __forceinline__ int step(int n, int stage) {
      const int tid = threadIdx.x, first_row = at.tile * Rows, head = at.head;
      const int64_t tile = scratch_of(at.head) / Rows + at.tile;
      int turn = 0;  // with options in shared memory, where thread 0 alone looks at it: a register less to hold
      int* const held_turn = reinterpret_cast<int*>(smem + kTileBytes + Window::kBytes);
      if (Deterministic && !Options) turn = at.turn(p, where, held);
      if (Deterministic && Options && tid == 0) *held_turn = at.turn(p, where, held);
      const int warp = ptx::opaque(tid / 32);
      const Lane l(warp, ptx::opaque(tid % 32));
      key_tile = ptx::opaque(key_tile), value_tile = ptx::opaque(value_tile), weight_tile = ptx::opaque(weight_tile);
      score_grad_tile = ptx::opaque(score_grad_tile), stats = ptx::opaque(stats);
      const bool whole = at.whole(first_row), border = Options ? found.hides : !whole;
      const uint32_t seen = found.seen;
      ptx::cp_async_wait<0>();
      __syncthreads();  // @stage_landed: every warp is done with the other one and with P and dS
      at.next();
      const int next = next_visible(n + 1);
      if (next < total) load(stage ^ 1);
      const uint32_t query_tile = query_stages + stage * kStage,
                     grad_out_tile = grad_out_stages + (OutStages == 2 ? stage : 0) * kStage;

      const auto look = [&] { return !Options && any_far(smem + (stats - base) + stage * kStats); };
      constexpr bool kLookFirst = D == 64;  // where the other way spills
      bool far = kLookFirst && look();
      Scores s = {}, dp = {};
      Tiles::product(s, key_tile, query_tile, l);
      Tiles::product(dp, value_tile, grad_out_tile, l);
      if (!Options && !whole) hide(s, first_row, l);
      const unsigned char* tile_stats =
          smem + (stats - base) + stage * kStats + (l.row_warp * (Rows / 2) + 4 * l.member) * 4;
      Operands weights, score_grads;
      const HeadScores scores(p, p.q_heads, where.batch, head);
      const OptionScores option{p, scores, held, first_row + l.row(), first_key + l.key(), seen};
      const uint32_t bits = Options && p.scores.seed ? option.kept_bits() : ~0u;
      constexpr bool kGuard = Ranged && !Options;  // where nothing is hidden, no number has to be kept from leaking
      const auto go = [&]<bool Guarded, bool Far>() {
        int64_t far_row = 0;
        if (Far || (Options && !kInverseStaged)) {
          const Lane own = D == 64 ? fresh_lane() : l;  // where the other way spills
          far_row = tile * Rows + own.row_warp * (Rows / 2) + 4 * own.member;
        }
        softmax<Guarded, Far>(weights, score_grads, s, dp, option, bits, tile_stats, far_row, l);
      };
      if (!kLookFirst) far = look();
      if (far) {
        if (kGuard && border)
          go.template operator()<kGuard, !Options>();
        else
          go.template operator()<false, !Options>();
      } else if (kGuard && border) {
        go.template operator()<kGuard, false>();
      } else {
        go.template operator()<false, false>();
      }
      __syncthreads();  // @scores_complete: P and dS
      const int chunk = l.row_warp * (D / 16);
      if (!Ranged || !border || Tiles::template finite<Rows, D / 16>(grad_out_tile, chunk, fresh_lane()))
        Tiles::accumulate(dv, weights, weight_tile, grad_out_tile, l);
      else
        Tiles::accumulate_guarded(dv, weight_tile, grad_out_tile, fresh_lane());
      if (OutStages == 1) {
        __syncthreads();  // @grad_out_read: by every warp
        if (next < total) load_grad_out(0);
      }
      if (!Ranged || !border || Tiles::template finite<Rows, D / 16>(query_tile, chunk, fresh_lane()))
        Tiles::accumulate(dk, score_grads, score_grad_tile, query_tile, l);
      else
        Tiles::accumulate_guarded(dk, score_grad_tile, query_tile, fresh_lane());
      add_query(tile, border, turn, held_turn, warp, l);
      if (Options && p.slope_sum && (next >= total || at.head != head)) {
        add_slopes<Keys, kWarps>(p, where, head, slope_sum,
                                 reinterpret_cast<float*>(smem + kTileBytes + Window::kBytes));
        slope_sum = 0.f;  // @slope_of_head
      }
      return next;
    }

    // dK and dV leave through the K and V tiles, so that global stores are whole 16-byte chunks.
    __device__ __forceinline__ void write() const {
      const int tid = threadIdx.x;
      const Lane l(tid / 32, tid % 32);
      // recomputed where holding it through the loop would spill
      const Sequence sequence = Deterministic || D == 256 ? held : sequence_of<Options>(p, where.batch);
      const float value_scale = Options && p.scores.seed ? p.scores.keep_scale : 1.f;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kKeyTiles; i++)
#pragma unroll
        for (int j = 0; j < kColumnTiles; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int row = l.key() + i * 16 + 8 * h, chunk = l.row_warp * kColumnTiles + j;
            unsigned char* to = smem + at_row(0, row, chunk) + l.member * 4;
            *reinterpret_cast<uint32_t*>(to) = ptx::pack2<T>(dk[i][j][2 * h] * p.scale, dk[i][j][2 * h + 1] * p.scale);
            *reinterpret_cast<uint32_t*>(to + Keys * kRow) =
                ptx::pack2<T>(dv[i][j][2 * h] * value_scale, dv[i][j][2 * h + 1] * value_scale);
          }
      __syncthreads();
      const auto grad_of = [&](void* tensor, const Strides& s) {
        return static_cast<T*>(tensor) + where.batch * s.batch + where.head_k * s.head + sequence.k_begin * s.row;
      };
      T* grad_key = p.grad_key ? grad_of(p.grad_key, p.grad_key_strides) : nullptr;
      T* grad_value = p.grad_value ? grad_of(p.grad_value, p.grad_value_strides) : nullptr;
#pragma unroll
      for (int i = 0; i < Keys * (D / 8) / kThreads; i++) {
        const int c = i * kThreads + tid, row = c / (D / 8), chunk = c % (D / 8);
        if (first_key + row >= sequence.k_rows) continue;
        const unsigned char* from = smem + at_row(0, row, chunk);
        if (grad_key && chunk * 8 < p.head_dim)
          *reinterpret_cast<uint4*>(grad_key + (first_key + row) * p.grad_key_strides.row + chunk * 8) =
              *reinterpret_cast<const uint4*>(from);
        if (grad_value && chunk * 8 < p.v_head_dim)
          *reinterpret_cast<uint4*>(grad_value + (first_key + row) * p.grad_value_strides.row + chunk * 8) =
              *reinterpret_cast<const uint4*>(from + Keys * kRow);
      }
    }

    __device__ __forceinline__ void run() {
      if (Options && first_key >= held.k_rows) return;
      int n = next_visible(0);
      if (n < total) {
        load_keys();
        load(0);
        if (OutStages == 1) load_grad_out(0);
      }
      for (int stage = 0; n < total; stage ^= 1) n = step(n, stage);
      write();
    }
  };

  template <bool Ranged>
  static __device__ __forceinline__ void run(const BackwardTask& p) {
    Block<Ranged>(p).run();
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
