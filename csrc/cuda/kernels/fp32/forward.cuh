// Attention forward for float and double on mma.sync (FlashAttention-2, arXiv 2307.08691), with all options. One block:
// four warps, kRows query rows of one head, keys in tiles of Keys; the copy of V under Q K^T and that of the next K
// under P V. head_dim and v_head_dim up to D; what is missing counts as zeros.
#pragma once
#include "cuda/kernels/common/forward_task.cuh"
#include "cuda/kernels/common/next_tile.cuh"
#include "cuda/kernels/common/pages.cuh"
#include "tiles.cuh"

namespace attnjourney {

// Parts: so many warps share 16 rows, each for its part of the output's columns (they do not fit one's registers); each
// computes the weights for itself. Paged: as in sm80/forward.cuh.
template <class Real_, int D, int Keys, int Parts = 1, bool Paged = false>
struct Fp32Forward {
  using Real = Real_;
  using T = Real;
  static constexpr int kD = D, kKeys = Keys, kThreads = 128, kRows = 64 / Parts, kW = kFp32Lanes<Real>;
  static constexpr int kOwn = kGroups<Real, D> / Parts;  // groups of columns
  static constexpr int kKeyBytes = Keys * D * sizeof(Real), kQueryBytes = kRows * D * sizeof(Real);
  static constexpr int kTileBytes = kQueryBytes + 2 * kKeyBytes;
  static constexpr int kFlagBytes = 2 * kThreads / 32 * 4;
  using Window = TileWindow<kThreads>;
  using PageTiles = PagedTiles<Keys>;
  using Pages = std::conditional_t<Paged, PagedKeys, NoPages>;
  static constexpr int kPagesAt = kTileBytes + kFlagBytes + Window::kBytes;
  static constexpr int kSmemBytes = kPagesAt + (Paged ? PageTiles::kBytes : 0);
  static constexpr bool kKeepQuery = D == 64 && sizeof(Real) == 4;  // in registers
  static constexpr int kBlocks = D == 256 ? 1 : 2;
  using Fragment = RowFragment<Keys / 8>;
  using Weights = Real[Keys / 8][4];
  using Sums = Real[kOwn * kW][4];

  static __device__ __forceinline__ Sequence sequence_at(const ForwardTaskOf<Real>& p, int batch) {
    if constexpr (Paged)
      return paged_sequence(p, batch);
    else
      return sequence_of<true>(p, batch);
  }

  static __device__ __forceinline__ void run(const ForwardTaskOf<Real>& p, const Pages& pages, int tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first_group = warp % Parts * kOwn, own_row = warp / Parts * 16;
    const ForwardTile where = packed_tile<kRows>(p, tile);
    const Sequence sequence = sequence_at(p, where.batch);
    if (where.row >= sequence.rows) return;
    if constexpr (Paged)
      if (sequence.rows <= pages.few_rows) return;
    const int head_k = where.head / p.group, row = where.row + own_row + g;
    const KeyTiles tiles = key_tiles_of<Keys, true>(p, sequence, where.row, where.row + kRows - 1);
    const KeyTiles own = key_tiles_of<Keys, true>(p, sequence, row - g, row - g + 15);
    const auto head_of = [&](const void* base, const Strides& s, int head, int begin) {
      return static_cast<const Real*>(base) + where.batch * s.batch + head * s.head + begin * s.row;
    };
    const Real* key = head_of(p.key, p.key_strides, head_k, sequence.k_begin);
    const Real* value = head_of(p.value, p.value_strides, head_k, sequence.k_begin);
    unsigned char* const query_tile = ptx::dynamic_smem();
    unsigned char *const key_tile = query_tile + kQueryBytes, *const value_tile = key_tile + kKeyBytes;
    [[maybe_unused]] const PageTiles page_tiles{query_tile + kPagesAt};
    [[maybe_unused]] int turn = 0;  // of the tile at hand
    const auto load = [&](unsigned char* tile, const Real* base, const Strides& s, int n, int dim) {
      if constexpr (Paged) {
        const bool is_key = tile == key_tile;
        load_pages<Real, D, Keys, kThreads>(tile, base, is_key ? pages.key_block : pages.value_block, s.row,
                                            page_tiles.places(turn), is_key ? pages.key_dim : pages.value_dim,
                                            pages.chunked, fp32_at<Real, D>);
      } else {
        fp32_load<Real, D, Keys, kThreads>(ptx::smem_addr(tile), base, s.row, n * Keys, tiles.key_end, dim);
        ptx::cp_async_commit();
      }
    };

    const HeadScoresOf<Real> scores(p, p.q_heads, where.batch, where.head);
    VisibleTile found;  // of the tile to come
    int flags_turn = 0;
    const auto flags = reinterpret_cast<uint32_t*>(query_tile + kTileBytes);
    const bool blocks = p.scores.mask_kind == MaskElement::blocks;
    Window window{flags + kFlagBytes / 4};
    const KeyTileWalk<kRows, Keys, Real> walk{p, sequence, scores, tiles, own, where.row, row};
    const auto next_visible = [&](int n) {
      if constexpr (Paged) {  // located before the barrier
        if (n < tiles.end)
          found.seen = page_tiles.template seen_in<Fragment>(turn, lane % 4 * 2, seen_in_tile<Fragment>(n, walk));
        return n;
      }
      return next_visible_tile<Fragment, kThreads / 32>(n, found, p.scores, walk, window, flags, flags_turn);
    };

    fp32_load<Real, D, kRows, kThreads>(ptx::smem_addr(query_tile),
                                        head_of(p.query, p.query_strides, where.head, sequence.q_begin),
                                        p.query_strides.row, where.row, sequence.rows, p.head_dim);
    if constexpr (Paged) {
      page_tiles.locate(pages, where.batch, tiles.first(), turn, tiles.key_end);
      __syncthreads();
    }
    const int first = next_visible(tiles.first());
    if (first < tiles.end) load(key_tile, key, p.key_strides, first, p.head_dim);
    ptx::cp_async_commit();

    Sums acc = {};
    Real row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    if (p.scores.sinks) {
      const Real sink = p.scores.sinks[scores.index];
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (row + 8 * h < sequence.q_len && sink != -INFINITY) {
          row_max[h] = sink_score(p.scores, sink);
          row_sum[h] = t == 0 ? 1 : 0;
        }
    }
    Fp32Operand<Real> query[kKeepQuery ? D / 8 : 1];

    for (int n = first, next; n < tiles.end; n = next) {
      ptx::cp_async_wait<0>();  // @key_landed: K (and Q) of this tile have landed
      __syncthreads();          // and every warp is past V of the tile before
      load(value_tile, value, p.value_strides, n, p.v_head_dim);
      const RowReader<Real, D> query_rows(query_tile, own_row, ptx::opaque(lane));
      const auto read_query = [&](Fp32Operand<Real>(&a)[kW / 2], int chunks) {
        row_operands<Real, D>(a, query_rows, chunks);
      };
      Weights s;
      if constexpr (kKeepQuery) {
        if (n == first)
#pragma unroll
          for (int k = 0; k < D / 8; k += 2) {
            Fp32Operand<Real> a[kW / 2];
            read_query(a, k * 8 / kW);
            query[k] = a[0], query[k + 1] = a[1];
          }
        const auto kept_query = [&](Fp32Operand<Real>(&a)[kW / 2], int chunks) {
          a[0] = query[chunks * kW / 8], a[1] = query[chunks * kW / 8 + 1];
        };
        rows_product<Real, D>(s, kept_query, key_tile, 0, p.head_dim, lane);
      } else {
        rows_product<Real, D>(s, read_query, key_tile, 0, p.head_dim, lane);
      }

      // Element e of s[j]: row g + 8 (e / 2) of the warp's, key 8 j + 2 t + e % 2 of the tile.
      score<Real, Fragment>(s, p.scores, scores, p.score_scale, sequence.keys.offset, row, n * Keys + 2 * t,
                            found.seen);
      Real alpha[2];
      softmax(s, alpha, row_max, row_sum, p.scores.exponent);
      if (p.scores.seed) drop<Fragment>(s, p.scores, scores, row, n * Keys + 2 * t);

      if constexpr (Paged) page_tiles.locate(pages, where.batch, tiles.above(n), turn ^ 1, tiles.key_end);
      ptx::cp_async_wait<0>();  // @value_landed
      __syncthreads();          // @key_read: by all warps
      const bool border = !tiles.whole(n) || p.scores.mask_kind > MaskElement::none || (blocks && !window.whole(n));
      turn ^= 1;
      next = next_visible(tiles.above(n));
      if (next < tiles.end) load(key_tile, key, p.key_strides, next, p.head_dim);
      if (border) guard(acc, s, value_tile, first_group, flags, flags_turn, lane);
      Fp32Operand<Real> weights[Keys / 8];
#pragma unroll
      for (int k = 0; k < Keys / 8; k++) weight_operand(weights[k], s[k]);
#pragma unroll
      for (int i = 0; i < kOwn; i++) {
        if (i && (first_group + i) * 8 * kW >= p.v_head_dim) break;
        Fp32Sum<Real> sum[kW];
        columns_product<Real, D, Keys / 8>(
            sum, [&](Fp32Operand<Real>& a, int k) { a = weights[k]; }, value_tile, first_group + i, lane);
#pragma unroll
        for (int j = 0; j < kW; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) acc[i * kW + j][e] = acc[i * kW + j][e] * alpha[e / 2] + sum[j][e];
      }
    }
    ptx::cp_async_wait<0>();  // without any key tile, Q is still on its way
    write(p, where, sequence, acc, row_max, row_sum, row, first_group, t);
  }

  // Scores to weights of this tile; alpha: what the sums so far are to be multiplied by.
  static __device__ __forceinline__ void softmax(Weights& s, Real (&alpha)[2], Real (&row_max)[2], Real (&row_sum)[2],
                                                 Real exponent) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      Real m = row_max[h];
#pragma unroll
      for (int j = 0; j < Keys / 8; j++) m = fmax(m, fmax(s[j][2 * h], s[j][2 * h + 1]));
      m = fmax(m, ptx::shfl_xor(m, 1));
      m = fmax(m, ptx::shfl_xor(m, 2));
      const Real base = m == -INFINITY ? 0 : m;
      alpha[h] = ptx::exp2((row_max[h] - base) * exponent);
      row_max[h] = m;
      Real sum = 0;
#pragma unroll
      for (int j = 0; j < Keys / 8; j++)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) {
          s[j][e] = ptx::exp2((s[j][e] - base) * exponent);
          sum += s[j][e];
        }
      row_sum[h] = row_sum[h] * alpha[h] + sum;
    }
  }

  // Values that are not finite count for the rows alone that see them. The whole block.
  static __device__ __forceinline__ void guard(Sums& acc, const Weights& s, unsigned char* tile, int first_group,
                                               uint32_t* flags, int& flags_turn, int lane) {
    if (!block_any(!share_finite<Real, D, Keys, kThreads>(tile), flags, flags_turn, kThreads / 32)) return;
    uint32_t bits[2];
    weight_bits<Keys / 8>(bits, s, lane);
    mark_not_finite<Real, D, kOwn>(acc, bits, tile, first_group, lane);
    __syncthreads();  // @values_seen: by all warps
    clear_share<Real, D, Keys, kThreads>(tile);
    __syncthreads();
  }

  static __device__ __forceinline__ void write(const ForwardTaskOf<Real>& p, const ForwardTile& where,
                                               const Sequence& sequence, const Sums& acc, const Real (&row_max)[2],
                                               const Real (&row_sum)[2], int row, int first_group, int t) {
    Real* out = static_cast<Real*>(p.out) + where.batch * p.out_strides.batch + where.head * p.out_strides.head;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = row + 8 * h;
      Real sum = row_sum[h];
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      if (r >= sequence.rows) continue;
      if (first_group == 0 && t == 0) {
        const int64_t head = p.cu_q ? where.head : int64_t(where.batch) * p.q_heads + where.head;
        write_stats(p, head * p.q_len + sequence.q_begin + r, row_max[h], sum, p.scores.unit != 1);
      }
      Real inverse = sum == 0 ? 0 : 1 / sum;
      if (p.scores.seed) inverse *= p.scores.keep_scale;
#pragma unroll
      for (int i = 0; i < 2 * kOwn; i++) {
        const int chunk = (first_group + i / 2) * 8 + 2 * t + i % 2;
        Real x[kW];
#pragma unroll
        for (int j = 0; j < kW; j++) x[j] = acc[i / 2 * kW + j][2 * h + i % 2] * inverse;
        if (chunk * kW < p.v_head_dim) write_chunk(out + (sequence.q_begin + r) * p.out_strides.row + chunk * kW, x);
      }
    }
  }
};

// The kernels that are built, by size (launch.h).
template <class Real, int D>
struct Fp32ForwardOf;
template <>
struct Fp32ForwardOf<float, 64> : Fp32Forward<float, 64, 32> {};
template <>
struct Fp32ForwardOf<float, 128> : Fp32Forward<float, 128, 32> {};
template <>
struct Fp32ForwardOf<float, 256> : Fp32Forward<float, 256, 16> {};
template <>
struct Fp32ForwardOf<double, 64> : Fp32Forward<double, 64, 32> {};
template <>
struct Fp32ForwardOf<double, 128> : Fp32Forward<double, 128, 16> {};
template <>
struct Fp32ForwardOf<double, 256> : Fp32Forward<double, 256, 16, 2> {};

// where shared memory is small
template <class Real, int D>
struct Fp32ForwardSmall : Fp32ForwardOf<Real, D> {};
template <>
struct Fp32ForwardSmall<double, 256> : Fp32Forward<double, 256, 8, 2> {};

// over pages; of double, those of small shared memory everywhere
template <class Real, int D>
struct Fp32ForwardPaged : Fp32Forward<Real, D,
                                      sizeof(Real) * D == 2048   ? 8
                                      : sizeof(Real) * D == 1024 ? 16
                                                                 : 32,
                                      sizeof(Real) * D == 2048 ? 2 : 1, true> {};

// grid: total tiles
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    fp32_forward(const __grid_constant__ ForwardTaskOf<typename Kernel::Real> p) {
  Kernel::run(p, {}, blockIdx.x);
}

// Over pages. grid: total tiles
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    fp32_paged_forward(const __grid_constant__ ForwardTaskOf<typename Kernel::Real> p, const PagedKeys pages) {
  Kernel::run(p, pages, blockIdx.x);
}

// Instead of Sm90Fp16x2Forward, where `needs_fallback` (Fp16x2Planes) is not 0; else it returns immediately. grid: what
// the device holds
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    fp32_forward_fallback(const __grid_constant__ ForwardTaskOf<typename Kernel::Real> p,
                          const uint32_t* needs_fallback) {
  if (*needs_fallback == 0) return;
  // no barrier between tiles: without options, the first copies of one go to memory that is unused by then
  for (int tile = blockIdx.x; tile < p.total; tile += gridDim.x) Kernel::run(p, {}, tile);
}

}  // namespace attnjourney
