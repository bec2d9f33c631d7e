// Attention backward for float and double on mma.sync (FlashAttention-2, arXiv 2307.08691), with all options. One
// block: Keys keys of one key head, all query tiles of all its query heads. S^T = K Q^T and dP^T = V dO^T, so that P^T
// and dS^T are already A operands of dV += P^T dO and dK += dS^T Q; dQ = dS K needs dS in shared memory.
#pragma once
#include "cuda/kernels/common/next_tile.cuh"
#include "cuda/kernels/common/slope_sum.cuh"
#include "tiles.cuh"

namespace attnjourney {

// Four warps of 16 keys each; below 64 keys, several share 16, each for its part of the columns of dK and dV. Stages:
// of the queries' tiles.
template <class Real_, int D, int Rows, int Keys, int Stages>
struct Fp32Backward {
  using Real = Real_;
  using T = Real;
  static constexpr int kD = D, kRows = Rows, kKeys = Keys, kThreads = 128, kWarps = 4, kW = kFp32Lanes<Real>;
  static constexpr int kParts = 64 / Keys, kOwn = kGroups<Real, D> / kParts;  // groups of columns
  static constexpr int kKeyBytes = Keys * D * sizeof(Real), kStage = Rows * D * sizeof(Real);
  static constexpr int kScoreBytes = Rows * Keys * sizeof(Real), kStats = 3 * Rows * sizeof(Real);
  static constexpr int kTileBytes = 2 * kKeyBytes + Stages * (2 * kStage + kStats) + kScoreBytes;
  using Window = TileWindow<kThreads>;
  static constexpr int kFlagBytes = 2 * kWarps * 4;
  static constexpr int kSmemBytes = kTileBytes + kFlagBytes + kWarps * static_cast<int>(sizeof(Real)) + Window::kBytes;
  using Fragment = KeyFragment<1, Rows / 8>;
  using Scores = Real[Rows / 8][4];
  using Sums = Real[kOwn * kW][4];

  // What a block has in shared memory.
  struct Tiles {
    unsigned char *key, *value, *query, *grad_out, *stats, *score;
    uint32_t* flags;
    Real* parts;
    uint32_t* window;
    explicit __device__ __forceinline__ Tiles(unsigned char* smem)
        : key(smem),
          value(key + kKeyBytes),
          query(value + kKeyBytes),
          grad_out(query + Stages * kStage),
          stats(grad_out + Stages * kStage),
          score(stats + Stages * kStats),
          flags(reinterpret_cast<uint32_t*>(smem + kTileBytes)),
          parts(reinterpret_cast<Real*>(smem + kTileBytes + kFlagBytes)),
          window(reinterpret_cast<uint32_t*>(parts + kWarps)) {}
  };

  static constexpr bool kOptions = true, kRecompute = sizeof(Real) == 4;  // see QueryTileWalk
  static __device__ __forceinline__ bool takes_turns(const BackwardTaskOf<Real>& p) { return p.turn; }
  struct Walk : QueryTileWalk<Fp32Backward, true, Real> {
    using Base = QueryTileWalk<Fp32Backward, true, Real>;
    using Base::Base;
    __device__ __forceinline__ Sequence sequence() const { return Base::turn_sequence(); }
    __device__ __forceinline__ int lane() const { return ptx::opaque(threadIdx.x % 32); }
    __device__ __forceinline__ TilePlace place(int, const Sequence& sequence) const {
      const int first_row = Base::at.tile * Rows, here = lane();
      const int own_key = static_cast<int>(threadIdx.x) / 32 / kParts * 16;
      return {first_row + here % 4 * 2, Base::first_key + own_key + here / 4,
              Base::at.whole(first_row) && first_row + Rows <= sequence.rows};
    }
  };

  static __device__ __forceinline__ void run(const BackwardTaskOf<Real>& p, unsigned block) {
    const int tid = threadIdx.x, warp = tid / 32, held_lane = tid % 32;
    const int own_key = warp / kParts * 16, first_group = warp % kParts * kOwn;
    Walk walk(p, block);
    const BackwardTile& where = walk.where;
    const Sequence& sequence = walk.held;
    const int n0 = walk.first_key, total = walk.total;
    if (n0 >= sequence.k_rows) return;
    auto& at = walk.at;
    const auto head_of = [&](const void* base, const Strides& s, int head, int begin) {
      return static_cast<const Real*>(base) + where.batch * s.batch + head * s.head + begin * s.row;
    };
    const Tiles tiles(ptx::dynamic_smem());
    const auto sequence_here = [&] { return walk.turn_sequence(); };
    const auto load = [&](int stage, int head, int tile) {
      const Sequence sequence = sequence_here();
      fp32_load<Real, D, Rows, kThreads>(ptx::smem_addr(tiles.query + stage * kStage),
                                         head_of(p.query, p.query_strides, head, sequence.q_begin), p.query_strides.row,
                                         tile * Rows, sequence.q_len, p.head_dim);
      fp32_load<Real, D, Rows, kThreads>(ptx::smem_addr(tiles.grad_out + stage * kStage),
                                         head_of(p.grad_out, p.grad_out_strides, head, sequence.q_begin),
                                         p.grad_out_strides.row, tile * Rows, sequence.q_len, p.v_head_dim);
      constexpr int kChunks = Rows / kW;
      if (tid < 3 * kChunks) {  // reference, inverse, delta
        const Real* from = (tid < kChunks       ? p.reference
                            : tid < 2 * kChunks ? p.inverse
                                                : p.delta) +
                           scratch_row(p, where.batch, head) + tile * Rows;
        ptx::cp_async_16(ptx::smem_addr(tiles.stats + stage * kStats + tid * 16), from + tid % kChunks * kW, true);
      }
      ptx::cp_async_commit();
    };

    VisibleTile found;  // of the tile to come
    int flags_turn = 0;
    const auto blocks = [&] { return p.scores.mask_kind == MaskElement::blocks; };
    Window window{tiles.window};
    const auto next_visible = [&](int n) {
      return next_visible_tile<Fragment, kWarps>(n, found, p.scores, walk, window, tiles.flags, flags_turn);
    };

    Sums dk = {}, dv = {};
    Real slope_sum = 0;
    const int first = next_visible(0);
    if (first < total) {
      const int k_len = sequence.keys.key_length;
      fp32_load<Real, D, Keys, kThreads>(ptx::smem_addr(tiles.key),
                                         head_of(p.key, p.key_strides, where.head_k, sequence.k_begin),
                                         p.key_strides.row, n0, k_len, p.head_dim);
      fp32_load<Real, D, Keys, kThreads>(ptx::smem_addr(tiles.value),
                                         head_of(p.value, p.value_strides, where.head_k, sequence.k_begin),
                                         p.value_strides.row, n0, k_len, p.v_head_dim);
      load(0, at.head, at.tile);
    }
    bool finite_keys = true;
    int stage = 0;
    for (int it = first, next; it < total; it = next) {
      const int m0 = at.tile * Rows, head = at.head, lane = ptx::opaque(held_lane);
      const int64_t tile = scratch_row(p, where.batch, head) / Rows + at.tile;
      const int turn = p.turn ? at.turn(p, where, sequence_here()) : 0;
      const bool border = !at.whole(m0) || p.scores.mask_kind > MaskElement::none || (blocks() && !window.whole(it));
      const uint32_t here = found.seen;
      ptx::cp_async_wait<0>();
      __syncthreads();  // @stage_landed: every warp is done with the other one and with dS
      at.next();
      next = next_visible(it + 1);
      if (Stages == 2 && next < total) load(stage ^ 1, at.head, at.tile);
      unsigned char *const query = tiles.query + stage * kStage, *const grad_out = tiles.grad_out + stage * kStage;
      if (it == first)
        finite_keys = !block_any(!share_finite<Real, D, Keys, kThreads>(tiles.key), tiles.flags, flags_turn, kWarps);

      // Element e of tile j: key n0 + own_key + g + 8 (e / 2), query m0 + 8 j + 2 t + e % 2.
      Scores s, ds;
      const auto rows_of = [&](const unsigned char* tile) {
        const RowReader<Real, D> reader(tile, own_key, lane);
        return [reader](Fp32Operand<Real>(&a)[kW / 2], int chunks) { row_operands<Real, D>(a, reader, chunks); };
      };
      rows_product<Real, D>(s, rows_of(tiles.key), query, 0, p.head_dim, lane);
      rows_product<Real, D>(ds, rows_of(tiles.value), grad_out, 0, p.v_head_dim, lane);
      const HeadScoresOf<Real> scores(p, p.q_heads, where.batch, head);
      weights(s, ds, p, scores, sequence_here(), m0 + lane % 4 * 2, n0 + own_key + lane / 4, here,
              tiles.stats + stage * kStats, slope_sum);
      if (warp % kParts == 0) write_scores(tiles.score, ds, own_key, lane);
      if (border) guard(dv, dk, s, ds, grad_out, query, first_group, tiles.flags, flags_turn, lane);
      __syncthreads();  // @scores_complete: dS

      accumulate(dv, s, grad_out, first_group, p.v_head_dim, lane);
      accumulate(dk, ds, query, first_group, p.head_dim, lane);
      if (p.turn) {
        if (tid == 0) ptx::turn_wait(p.turn + 2 * tile, turn);
        __syncthreads();
      }
      if (p.grad_query)
        add_query(p.query_sum + tile * (Rows * D), tiles, finite_keys || !border, p.head_dim, warp, lane);
      if (p.turn) {
        ptx::thread_fence();
        __syncthreads();
        if (tid == 0) ptx::turn_pass(p.turn + 2 * tile, turn + 1);
      }
      if (p.slope_sum && (next >= total || at.head != head)) {
        add_slopes<Keys, kWarps>(p, where, head, warp % kParts == 0 ? slope_sum : 0, tiles.parts);
        slope_sum = 0;
      }
      if (Stages == 1) {
        __syncthreads();  // every warp is done with the stage
        if (next < total) load(0, at.head, at.tile);
      } else {
        stage ^= 1;
      }
    }
    const Real value_scale = p.scores.seed ? p.scores.keep_scale : 1;
    write(p.grad_key, p.grad_key_strides, dk, p.scale, where, sequence, own_key, first_group, p.head_dim, held_lane);
    write(p.grad_value, p.grad_value_strides, dv, value_scale, where, sequence, own_key, first_group, p.v_head_dim,
          held_lane);
  }

  // s: products q . k to weights after dropout; ds: dO . v to the gradients of q . k, without the scale. row, key: of
  // element 0.
  static __device__ __forceinline__ void weights(Scores& s, Scores& ds, const BackwardTaskOf<Real>& p,
                                                 const HeadScoresOf<Real>& scores, const Sequence& sequence, int row,
                                                 int key, uint32_t seen, const unsigned char* stats, Real& slope_sum) {
    const int lane = threadIdx.x % 32, offset = sequence.keys.offset;
    const uint32_t bits = p.scores.seed ? kept(p.scores, scores, row, key, lane, Fragment{}) : ~0u;
#pragma unroll
    for (int j = 0; j < Rows / 8; j++) {
      Real reference[2], inverse[2], delta[2];
      const unsigned char* from = stats + (8 * j + lane % 4 * 2) * sizeof(Real);
      read_pair(reference, from);
      read_pair(inverse, from + Rows * sizeof(Real));
      read_pair(delta, from + 2 * Rows * sizeof(Real));
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int i = 4 * j + e, r = row + Fragment::row(i), k = key + Fragment::key(i);
        const bool keep = bits >> i & 1;
        const WeightedScore<Real> x =
            weighted<T>(p.scores, scores, r, k, offset, seen >> i & 1, keep, s[j][e], p.score_scale,
                        {reference[e % 2], inverse[e % 2]}, ds[j][e], delta[e % 2]);
        if (p.slope_sum) slope_sum -= x.grad * distance<Real>(r, k, offset);
        s[j][e] = keep ? x.weight : 0;
        ds[j][e] = x.grad * x.slope;
      }
    }
  }

  // dS [Rows][Keys]
  static __device__ __forceinline__ void write_scores(unsigned char* tile, const Scores& ds, int own_key, int lane) {
#pragma unroll
    for (int i = 0; i < Rows / 2; i++) {
      const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, key = own_key + lane / 4 + i / 2 % 2 * 8;
      *reinterpret_cast<Real*>(tile + fp32_at<Real, Keys>(row, key / kW) + key % kW * sizeof(Real)) = ds[i / 4][i % 4];
    }
  }

  // Rows of Q and dO that are not finite count for the keys alone that they see. The whole block.
  static __device__ __forceinline__ void guard(Sums& dv, Sums& dk, const Scores& s, const Scores& ds,
                                               unsigned char* grad_out, unsigned char* query, int first_group,
                                               uint32_t* flags, int& flags_turn, int lane) {
    const bool finite = share_finite<Real, D, Rows, kThreads>(grad_out) && share_finite<Real, D, Rows, kThreads>(query);
    if (!block_any(!finite, flags, flags_turn, kWarps)) return;
    uint32_t bits[2];
    weight_bits<Rows / 8>(bits, s, lane);
    mark_not_finite<Real, D, kOwn>(dv, bits, grad_out, first_group, lane);
    weight_bits<Rows / 8>(bits, ds, lane);
    mark_not_finite<Real, D, kOwn>(dk, bits, query, first_group, lane);
    __syncthreads();  // all warps have seen them
    clear_share<Real, D, Rows, kThreads>(grad_out);
    clear_share<Real, D, Rows, kThreads>(query);
  }

  // d += A B for this warp's columns of a tile
  static __device__ __forceinline__ void accumulate(Sums& d, const Scores& weights, const unsigned char* tile,
                                                    int first_group, int dim, int lane) {
    Fp32Operand<Real> a[Rows / 8];
#pragma unroll
    for (int k = 0; k < Rows / 8; k++) weight_operand(a[k], weights[k]);
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      if (i && (first_group + i) * 8 * kW >= dim) break;
      Fp32Sum<Real> sum[kW];
      columns_product<Real, D, Rows / 8>(
          sum, [&](Fp32Operand<Real>& x, int k) { x = a[k]; }, tile, first_group + i, lane);
#pragma unroll
      for (int j = 0; j < kW; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) d[i * kW + j][e] += sum[j][e];
    }
  }

  // Where element e of tile j of a unit lies in query_sum's tile: kHeight rows by one group of columns a unit,
  // warp-wide additions to 32 neighbours.
  static constexpr int kHeight = Rows < 16 ? Rows : 16, kHalves = kHeight / 8;
  static __device__ __forceinline__ int unit_at(int unit, int j, int e) {
    return (unit * kW + j) * 8 * kHeight + e * 32;
  }

  // dQ of this tile: units in turns among the warps.
  static __device__ __forceinline__ void add_query(Real* sum_tile, const Tiles& tiles, bool finite, int dim, int warp,
                                                   int lane) {
    constexpr int kHigh = Rows / kHeight, kUnits = kHigh * kGroups<Real, D>;
#pragma unroll 1
    for (int unit = warp; unit < kUnits; unit += kWarps) {
      const int row = unit % kHigh * kHeight + lane / 4, group = unit / kHigh;
      if (group * 8 * kW >= dim) break;
      Real dq[kW][4];
      if (finite) {
        Fp32Sum<Real> sum[kW];
        const auto read = [&](Fp32Operand<Real>& a, int k) {
          Real x[2], y[2] = {};
          const int key = 8 * k + lane % 4 * 2, in_chunk = key % kW * static_cast<int>(sizeof(Real));
          read_pair(x, tiles.score + fp32_at<Real, Keys>(row, key / kW) + in_chunk);
          if (kHalves == 2) read_pair(y, tiles.score + fp32_at<Real, Keys>(row + 8, key / kW) + in_chunk);
          a.set(x[0], y[0], x[1], y[1]);
        };
        columns_product<Real, D, Keys / 8>(sum, read, tiles.key, group, lane);
#pragma unroll
        for (int j = 0; j < kW; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) dq[j][e] = sum[j][e];
      } else {
        seen_keys_product(dq, tiles, row, group, lane);
      }
#pragma unroll
      for (int i = 0; i < 4 * kW; i++)
        if (i % 4 / 2 < kHalves) ptx::reduce_add(sum_tile + unit_at(unit, i / 4, i % 4) + lane, dq[i / 4][i % 4]);
    }
  }
  // The same one by one, for keys that are not finite and rows that do not see them.
  static __device__ __forceinline__ void seen_keys_product(Real (&dq)[kW][4], const Tiles& tiles, int row, int group,
                                                           int lane) {
#pragma unroll
    for (int i = 0; i < 4 * kW; i++) dq[i / 4][i % 4] = 0;
#pragma unroll 1
    for (int key = 0; key < Keys; key++)
#pragma unroll
      for (int h = 0; h < kHalves; h++) {
        const Real ds = *reinterpret_cast<const Real*>(tiles.score + fp32_at<Real, Keys>(row + 8 * h, key / kW) +
                                                       key % kW * sizeof(Real));
        if (ds == 0) continue;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          Real x[kW];
          read_chunk(x, tiles.key + fp32_at<Real, D>(key, group * 8 + lane % 4 * 2 + e));
#pragma unroll
          for (int j = 0; j < kW; j++) dq[j][2 * h + e] += ds * x[j];
        }
      }
  }

  static __device__ __forceinline__ void write(void* to, const Strides& strides, const Sums& d, Real scale,
                                               const BackwardTile& where, const Sequence& sequence, int own_key,
                                               int first_group, int dim, int lane) {
    if (!to) return;
    Real* out = static_cast<Real*>(to) + where.batch * strides.batch + where.head_k * strides.head;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int key = where.key_tile * Keys + own_key + lane / 4 + 8 * h;
      if (key >= sequence.k_rows) continue;
#pragma unroll
      for (int i = 0; i < 2 * kOwn; i++) {
        const int chunk = (first_group + i / 2) * 8 + lane % 4 * 2 + i % 2;
        Real x[kW];
#pragma unroll
        for (int j = 0; j < kW; j++) x[j] = d[i / 2 * kW + j][2 * h + i % 2] * scale;
        if (chunk * kW < dim) write_chunk(out + (sequence.k_begin + key) * strides.row + chunk * kW, x);
      }
    }
  }
};

// The kernels that are built, by size (launch.h).
template <class Real, int D>
struct Fp32BackwardOf;
template <>
struct Fp32BackwardOf<float, 64> : Fp32Backward<float, 64, 32, 64, 2> {};
template <>
struct Fp32BackwardOf<float, 128> : Fp32Backward<float, 128, 16, 64, 2> {};
template <>
struct Fp32BackwardOf<float, 256> : Fp32Backward<float, 256, 16, 32, 2> {};
template <>
struct Fp32BackwardOf<double, 64> : Fp32Backward<double, 64, 16, 64, 2> {};
template <>
struct Fp32BackwardOf<double, 128> : Fp32Backward<double, 128, 16, 32, 2> {};
template <>
struct Fp32BackwardOf<double, 256> : Fp32Backward<double, 256, 16, 16, 1> {};

// where shared memory is small: one stage, or fewer rows
template <class Real, int D>
struct Fp32BackwardSmall : Fp32Backward<Real, D, Fp32BackwardOf<Real, D>::kRows, Fp32BackwardOf<Real, D>::kKeys, 1> {};
template <>
struct Fp32BackwardSmall<double, 128> : Fp32Backward<double, 128, 8, 32, 2> {};
template <>
struct Fp32BackwardSmall<double, 256> : Fp32Backward<double, 256, 8, 16, 1> {};

// grid: key_tiles * kv_heads * batch
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    fp32_backward(const __grid_constant__ BackwardTaskOf<typename Kernel::Real> p) {
  Kernel::run(p, blockIdx.x);
}

// Instead of Fp16x2Backward, where `needs_fallback` (Fp16x2BackwardPlanes) is not 0; else it returns immediately. grid:
// as above, or where blocks do not wait for one another (BackwardTaskOf::turn) what the device holds
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    fp32_backward_fallback(const __grid_constant__ BackwardTaskOf<typename Kernel::Real> p,
                           const uint32_t* needs_fallback, unsigned blocks) {
  if (*needs_fallback == 0) return;
  for (unsigned block = blockIdx.x; block < blocks; block += gridDim.x) {
    Kernel::run(p, block);
    __syncthreads();  // @tiles_read: by every warp
  }
}

}  // namespace attnjourney
