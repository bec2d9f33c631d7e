// The derivative of attention in a direction for float and double on mma.sync: the walk of fp32/forward.cuh with all
// its options, over tiles of K and dK, V and dV. Five products where the forward has two; those of a direction that is
// zero are left out, with its copies. Blocks in which a row takes a pivot (common/jvp_task.cuh) walk once more.
#pragma once
#include "cuda/kernels/common/jvp_task.cuh"
#include "forward.cuh"

namespace attnjourney {

// OneTile: V and dV lie where K and dK were, and are fetched when these have been read.
template <class Real_, int D, int Keys, int Parts = 1, bool OneTile = false>
struct Fp32Jvp {
  using Real = Real_;
  using T = Real;
  using Forward = Fp32Forward<Real, D, Keys, Parts>;
  static constexpr int kD = D, kKeys = Keys, kThreads = Forward::kThreads, kRows = Forward::kRows;
  static constexpr int kW = Forward::kW, kOwn = Forward::kOwn, kBlocks = 1;
  static constexpr int kRowBytes = Forward::kQueryBytes, kKeyBytes = Forward::kKeyBytes;
  static constexpr int kTileBytes = 2 * kRowBytes + (OneTile ? 2 : 4) * kKeyBytes;
  using Window = typename Forward::Window;
  using Fragment = typename Forward::Fragment;
  using Weights = typename Forward::Weights;
  using Sums = typename Forward::Sums;
  using Rows = TangentRow<T, Real>[2];
  struct Place {  // what a block knows of where it stands
    ForwardTile where;
    int key_head;
    Sequence sequence;
    KeyTiles tiles;
    HeadScoresOf<Real> scores;
    HeadChange<Real> change;
  };
  static constexpr bool kPlaced = sizeof(Real) == 4;  // in shared memory: held in registers, it would spill
  static constexpr int kPlaceAt = kTileBytes + Forward::kFlagBytes + Window::kBytes;
  static constexpr int kSmemBytes = kPlaceAt + (kPlaced ? sizeof(Place) : 0);

  static __device__ __forceinline__ void run(const JvpTaskOf<Real>& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first_group = warp % Parts * kOwn, own_row = warp / Parts * 16;
    const ForwardTile block = packed_tile<kRows>(p, blockIdx.x);
    const Sequence held = sequence_of<true>(p, block.batch);
    if (block.row >= held.rows) return;
    const Place own_place{block,
                          block.head / p.group,
                          held,
                          key_tiles_of<Keys, true>(p, held, block.row, block.row + kRows - 1),
                          HeadScoresOf<Real>(p, p.q_heads, block.batch, block.head),
                          HeadChange<Real>(p, block.batch, block.head)};
    Place& placed = *reinterpret_cast<Place*>(ptx::dynamic_smem() + kPlaceAt);
    if constexpr (kPlaced) {
      if (threadIdx.x == 0) placed = own_place;
      __syncthreads();  // @place_there
    }
    const auto& [where, key_head, sequence, tiles, scores, change] = kPlaced ? placed : own_place;
    const int row = block.row + own_row + g;
    const KeyTiles own = key_tiles_of<Keys, true>(p, sequence, row - g, row - g + 15);
    const bool moves = p.moves(), blocks = p.scores.mask_kind == MaskElement::blocks;
    unsigned char* const query_tile = ptx::dynamic_smem();
    unsigned char *const query_change = query_tile + kRowBytes, *const key_tile = query_change + kRowBytes;
    unsigned char* const key_change = key_tile + kKeyBytes;
    unsigned char* const value_tile = OneTile ? key_tile : key_change + kKeyBytes;
    unsigned char* const value_change = value_tile + kKeyBytes;
    const auto flags = reinterpret_cast<uint32_t*>(query_tile + kTileBytes);
    const auto load = [&]<int Count>(unsigned char* tile, const void* base, const Strides& s, int head, int begin,
                                     int row0, int rows, int dim) {
      if (!base) return;
      const Real* of = static_cast<const Real*>(base) + where.batch * s.batch + head * s.head + begin * s.row;
      fp32_load<Real, D, Count, kThreads>(ptx::smem_addr(tile), of, s.row, row0, rows, dim);
    };
    const auto load_rows = [&](unsigned char* tile, const void* base, const Strides& s) {
      load.template operator()<kRows>(tile, base, s, where.head, sequence.q_begin, where.row, sequence.rows,
                                      p.head_dim);
    };
    const auto load_tile = [&](unsigned char* tile, const void* base, const Strides& s, int n, int dim) {
      load.template operator()<Keys>(tile, base, s, key_head, sequence.k_begin, n * Keys, tiles.key_end, dim);
    };
    const auto load_keys = [&](int n) {
      load_tile(key_tile, p.key, p.key_strides, n, p.head_dim);
      load_tile(key_change, p.key_tangent, p.key_tangent_strides, n, p.head_dim);
      ptx::cp_async_commit();
    };
    const auto load_values = [&](int n) {
      if (moves) load_tile(value_tile, p.value, p.value_strides, n, p.v_head_dim);
      load_tile(value_change, p.value_tangent, p.value_tangent_strides, n, p.v_head_dim);
      ptx::cp_async_commit();
    };

    VisibleTile found;  // of the tile to come
    int flags_turn = 0;
    Window window{flags + Forward::kFlagBytes / 4};
    const KeyTileWalk<kRows, Keys, Real> walk{p, sequence, scores, tiles, own, where.row, row};
    const auto next_visible = [&](int n) {
      return next_visible_tile<Fragment, kThreads / 32>(n, found, p.scores, walk, window, flags, flags_turn);
    };

    load_rows(query_tile, p.query, p.query_strides);
    load_rows(query_change, p.query_tangent, p.query_tangent_strides);
    ptx::cp_async_commit();
    Sums acc = {};
    Rows rows;
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (row + 8 * h < sequence.q_len) rows[h].begin(p.stats[first_stat(p, where, sequence.q_begin) + row + 8 * h]);

    for (bool again = false;;) {
      window.base = -kThreads;
      const int first = next_visible(tiles.first());
      if (first < tiles.end) load_keys(first);
      for (int n = first, next; n < tiles.end; n = next) {
        ptx::cp_async_wait<0>();  // @key_landed: K, dK (and Q, dQ) of this tile have landed
        __syncthreads();          // and every warp is past V and dV of the tile before
        if (!OneTile) load_values(n);
        const int here = ptx::opaque(lane);  // hoisted out of the loop, addresses would spill
        Weights s, a;
        product(s, query_tile, key_tile, own_row, p.head_dim, here);
        if (p.query_tangent)
          product(a, query_change, key_tile, own_row, p.head_dim, here);
        else
          clear(a);
        if (p.key_tangent) {
          Weights more;
          product(more, query_tile, key_change, own_row, p.head_dim, here);
#pragma unroll
          for (int i = 0; i < Fragment::kCount; i++) a[i / 4][i % 4] += more[i / 4][i % 4];
        }
        change_weights<T, Fragment>(s, a, p, scores, change, sequence.keys.offset, row, n * Keys + 2 * t, found.seen,
                                    rows);
        const bool border = !tiles.whole(n) || p.scores.mask_kind > MaskElement::none || (blocks && !window.whole(n));
        if (OneTile) {
          __syncthreads();  // @key_read: by all warps
          load_values(n);
        }
        ptx::cp_async_wait<0>();  // @value_landed
        __syncthreads();
        next = next_visible(tiles.above(n));
        if (!OneTile && next < tiles.end) load_keys(next);
        if (border && moves) Forward::guard(acc, s, value_tile, first_group, flags, flags_turn, lane);
        if (border && p.value_tangent) Forward::guard(acc, s, value_change, first_group, flags, flags_turn, lane);
        if (moves) add_values(acc, a, value_tile, first_group, p.v_head_dim, lane);
        if (p.value_tangent) add_values(acc, s, value_change, first_group, p.v_head_dim, lane);
        if (OneTile) {
          __syncthreads();  // @value_read: by all warps
          if (next < tiles.end) load_keys(next);
        }
      }
      ptx::cp_async_wait<0>();  // without any key tile, Q is still on its way
      if (again || !moves) break;
      const bool first_takes = rows[0].take_pivot(), second_takes = rows[1].take_pivot();
      again = block_any(first_takes || second_takes, flags, flags_turn, kThreads / 32);
      if (!again) break;
      rows[0].clear_sums(), rows[1].clear_sums();
      clear(acc);
    }
    write(p, acc, rows);
  }

  template <int N>
  static __device__ __forceinline__ void clear(Real (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) x[i / 4][i % 4] = 0;
  }

  // s = Q K^T for this warp's rows
  static __device__ __forceinline__ void product(Weights& s, const unsigned char* rows, const unsigned char* keys,
                                                 int own_row, int dim, int lane) {
    const RowReader<Real, D> reader(rows, own_row, lane);
    const auto read = [&](Fp32Operand<Real>(&a)[kW / 2], int chunks) { row_operands<Real, D>(a, reader, chunks); };
    rows_product<Real, D>(s, read, keys, 0, dim, lane);
  }

  // acc += S V for this warp's columns
  static __device__ __forceinline__ void add_values(Sums& acc, const Weights& s, const unsigned char* tile,
                                                    int first_group, int dim, int lane) {
    Fp32Operand<Real> weights[Keys / 8];
#pragma unroll
    for (int k = 0; k < Keys / 8; k++) weight_operand(weights[k], s[k]);
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      if (i && (first_group + i) * 8 * kW >= dim) break;
      Fp32Sum<Real> sum[kW];
      columns_product<Real, D, Keys / 8>(
          sum, [&](Fp32Operand<Real>& a, int k) { a = weights[k]; }, tile, first_group + i, lane);
#pragma unroll
      for (int j = 0; j < kW; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[i * kW + j][e] += sum[j][e];
    }
  }

  static __device__ __forceinline__ void write(const JvpTaskOf<Real>& p, const Sums& acc, const Rows& rows) {
    // once more: held through the loop, this would spill
    const int lane = ptx::opaque(threadIdx.x % 32), warp = ptx::opaque(threadIdx.x / 32), t = lane % 4;
    const ForwardTile where = packed_tile<kRows>(p, ptx::opaque(blockIdx.x));
    const Sequence sequence = sequence_of<true>(p, where.batch);
    const int row = where.row + warp / Parts * 16 + lane / 4, first_group = warp % Parts * kOwn;
    const uint32_t head = where.batch * p.q_heads + where.head;
    const auto at = [&](const void* base, const Strides& s) {
      return static_cast<const Real*>(base) + where.batch * s.batch + where.head * s.head + sequence.q_begin * s.row;
    };
    const Real* const out = at(p.out, p.out_strides);
    Real* const to = const_cast<Real*>(at(p.out_tangent, p.out_tangent_strides));
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = row + 8 * h;
      const RowTangent<Real> of(p, rows[h], head, r < sequence.q_len);
      if (r >= sequence.rows) continue;
      if (first_group == 0 && t == 0) p.lse_tangent[first_stat(p, where, sequence.q_begin) + r] = of.lse;
#pragma unroll
      for (int i = 0; i < 2 * kOwn; i++) {
        const int chunk = (first_group + i / 2) * 8 + 2 * t + i % 2;
        if (chunk * kW >= p.v_head_dim) continue;
        Real x[kW], y[kW];
        read_chunk(y, reinterpret_cast<const unsigned char*>(out + r * p.out_strides.row + chunk * kW));
#pragma unroll
        for (int j = 0; j < kW; j++) x[j] = of.factor * acc[i / 2 * kW + j][2 * h + i % 2] - of.mean * y[j];
        write_chunk(to + r * p.out_tangent_strides.row + chunk * kW, x);
      }
    }
  }
};

// The kernels that are built, by size (launch.h): each fits into 99 KB.
template <class Real, int D>
struct Fp32JvpOf;
template <>
struct Fp32JvpOf<float, 64> : Fp32Jvp<float, 64, 8> {};
template <>
struct Fp32JvpOf<float, 128> : Fp32Jvp<float, 128, 8> {};
template <>
struct Fp32JvpOf<float, 256> : Fp32Jvp<float, 256, 8, 2> {};
template <>
struct Fp32JvpOf<double, 64> : Fp32Jvp<double, 64, 16> {};
template <>
struct Fp32JvpOf<double, 128> : Fp32Jvp<double, 128, 8, 2> {};
template <>
struct Fp32JvpOf<double, 256> : Fp32Jvp<double, 256, 8, 4, true> {};

// grid: total tiles
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    fp32_jvp(const __grid_constant__ JvpTaskOf<typename Kernel::Real> p) {
  Kernel::run(p);
}

}  // namespace attnjourney
