// The derivative of attention in a direction on mma.sync, for 16-bit numbers and every GPU from Ampere on: the walk of
// sm80/forward.cuh with all its options, over tiles of K and dK, V and dV. One block: 64 rows of Q and dQ, four warps
// of 16. Five products where the forward has two: Q K^T, dQ K^T, Q dK^T, (P A) V, P dV; those of a direction that is
// zero are left out, with its copies. d(lse) is the sum of the P A that are not yet rounded; what d(out) subtracts is
// that of the rounded ones, so that the share of V that all keys have in common cancels.
#pragma once
#include "cuda/kernels/common/jvp_task.cuh"
#include "forward.cuh"
#include "row_products.cuh"

namespace attnjourney {

template <class T_, int D, int Keys>
struct Sm80Jvp {
  using T = T_;
  using Forward = Sm80Forward<T, D, D, Keys, true>;
  static constexpr int kD = D, kRows = Forward::kRows, kKeys = Keys, kThreads = Forward::kThreads;
  static constexpr int kTileBytes = 2 * Forward::kTileBytes, kRowBytes = Forward::kQueryBytes;
  static constexpr int kKeyBytes = Forward::kKeyBytes;
  using Window = typename Forward::Window;
  using Fragment = typename Forward::Fragment;
  static constexpr int kSmemBytes = kTileBytes + Window::kBytes;
  using Products = Sm80RowProducts<T, D, Keys>;
  using Weights = typename Products::Weights;
  using Sums = typename Products::Sums;

  static __device__ __forceinline__ void run(const JvpTask& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const ForwardTile where = packed_tile<kRows>(p, blockIdx.x);
    const Sequence sequence = sequence_of<true>(p, where.batch);
    if (where.row >= sequence.rows) return;
    const int head_k = where.head / p.group, row = where.row + warp * 16 + g;
    const KeyTiles tiles = key_tiles_of<kKeys, true>(p, sequence, where.row, where.row + kRows - 1);
    const KeyTiles own = key_tiles_of<kKeys, true>(p, sequence, row - g, row - g + 15);
    const bool moves = p.moves();
    unsigned char* smem = ptx::dynamic_smem();
    const uint32_t query_tile = ptx::smem_addr(smem), query_change = query_tile + kRowBytes;
    const uint32_t key_tile = query_change + kRowBytes, key_change = key_tile + kKeyBytes;
    const uint32_t value_tile = key_change + kKeyBytes, value_change = value_tile + kKeyBytes;
    const auto head_of = [&](const void* base, const Strides& s, int head, int begin) {
      return static_cast<const T*>(base) + where.batch * s.batch + head * s.head + begin * s.row;
    };
    const auto load = [&]<int Count>(uint32_t tile, const void* base, const Strides& s, int head, int begin, int row0,
                                     int rows, int dim) {
      if (base) Forward::template load_tile<D, Count>(tile, head_of(base, s, head, begin), s.row, row0, rows, dim);
    };
    const auto load_rows = [&](uint32_t tile, const void* base, const Strides& s) {
      load.template operator()<kRows>(tile, base, s, where.head, sequence.q_begin, where.row, sequence.rows,
                                      p.head_dim);
    };
    const auto load_tile = [&](uint32_t tile, const void* base, const Strides& s, int n, int dim) {
      load.template operator()<kKeys>(tile, base, s, head_k, sequence.k_begin, n * kKeys, tiles.key_end, dim);
    };
    const auto load_keys = [&](int n) {
      load_tile(key_tile, p.key, p.key_strides, n, p.head_dim);
      load_tile(key_change, p.key_tangent, p.key_tangent_strides, n, p.head_dim);
    };

    const HeadScores scores(p, p.q_heads, where.batch, where.head);
    const HeadChange<float> change(p, where.batch, where.head);
    VisibleTile found;  // of the tile to come
    int flags_turn = 0;
    Window window{reinterpret_cast<uint32_t*>(smem + kTileBytes)};
    const KeyTileWalk<kRows, kKeys, float> walk{p, sequence, scores, tiles, own, where.row, row};
    const auto next_visible = [&](int n) {
      return next_visible_tile<Fragment, kThreads / 32>(n, found, p.scores, walk, window, window.found, flags_turn);
    };

    load_rows(query_tile, p.query, p.query_strides);
    load_rows(query_change, p.query_tangent, p.query_tangent_strides);
    const int first_tile = next_visible(tiles.first());
    if (first_tile < tiles.end) load_keys(first_tile);

    Sums acc = {};
    TangentRow<T, float> rows[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (row + 8 * h < sequence.q_len) rows[h].begin(p.stats[first_stat(p, where, sequence.q_begin) + row + 8 * h]);

    int at = lane;
    for (int n = first_tile, next; n < tiles.end; n = next) {
      at = ptx::opaque(at);     // hoisted out of the loop, addresses would spill
      ptx::cp_async_wait<0>();  // @key_landed: K, dK (and Q, dQ) of this tile have landed
      __syncthreads();          // @value_read: every warp is past V and dV of the tile before
      if (moves) load_tile(value_tile, p.value, p.value_strides, n, p.v_head_dim);
      load_tile(value_change, p.value_tangent, p.value_tangent_strides, n, p.v_head_dim);

      Weights s = {}, a = {};
      Products::add_scores(s, query_tile, key_tile, warp * 16, 0, at);
      if (p.query_tangent) Products::add_scores(a, query_change, key_tile, warp * 16, 0, at);
      if (p.key_tangent) Products::add_scores(a, query_tile, key_change, warp * 16, 0, at);
      const bool hides = found.hides;
      change_weights<T, Fragment>(s, a, p, scores, change, sequence.keys.offset, row, n * kKeys + 2 * t, found.seen,
                                  rows);

      ptx::cp_async_wait<0>();  // @value_landed
      __syncthreads();          // @key_read: by all warps
      next = next_visible(tiles.above(n));
      if (next < tiles.end) load_keys(next);
      if (moves) Products::add_values(acc, a, value_tile, hides, 0, lane, at);
      if (p.value_tangent) Products::add_values(acc, s, value_change, hides, 0, lane, at);
    }
    ptx::cp_async_wait<0>();  // without any key tile, Q is still on its way
    write(p, acc, rows);
  }

  static __device__ __forceinline__ void write(const JvpTask& p, const Sums& acc,
                                               const TangentRow<T, float> (&rows)[2]) {
    const int lane = ptx::opaque(threadIdx.x % 32), t = lane % 4;
    // once more: held through the loop, this would spill
    const ForwardTile where = packed_tile<kRows>(p, ptx::opaque(blockIdx.x));
    const Sequence sequence = sequence_of<true>(p, where.batch);
    const int row = where.row + threadIdx.x / 32 * 16 + lane / 4;
    const uint32_t head = where.batch * p.q_heads + where.head;
    const int64_t stat = first_stat(p, where, sequence.q_begin);
    const T* out = static_cast<const T*>(p.out) + where.batch * p.out_strides.batch + where.head * p.out_strides.head +
                   sequence.q_begin * p.out_strides.row + 2 * t;
    T* to = static_cast<T*>(p.out_tangent) + where.batch * p.out_tangent_strides.batch +
            where.head * p.out_tangent_strides.head + sequence.q_begin * p.out_tangent_strides.row + 2 * t;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = row + 8 * h;
      const RowTangent<float> of(p, rows[h], head, r < sequence.q_len);
      if (r >= sequence.rows) continue;
      if (t == 0) p.lse_tangent[stat + r] = of.lse;
#pragma unroll
      for (int j = 0; j < D / 8; j++) {
        if (j * 8 >= p.v_head_dim) break;
        const float2 x = ptx::unpack2<T>(*reinterpret_cast<const uint32_t*>(out + r * p.out_strides.row + j * 8));
        *reinterpret_cast<uint32_t*>(to + r * p.out_tangent_strides.row + j * 8) =
            ptx::pack2<T>(of.factor * acc[j][2 * h] - of.mean * x.x, of.factor * acc[j][2 * h + 1] - of.mean * x.y);
      }
    }
  }
};

// The kernels that are built, by size.
template <class T, int D>
using Sm80JvpOf = Sm80Jvp<T, D, D == 256 ? 16 : 32>;

// grid: total tiles
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 2) sm80_jvp(const __grid_constant__ JvpTask p) {
  Kernel::run(p);
}

}  // namespace attnjourney
