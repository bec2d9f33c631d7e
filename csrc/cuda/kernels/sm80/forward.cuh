// Attention forward on mma.sync, for every GPU from Ampere on (FlashAttention-2, arXiv 2307.08691). One block: 64 query
// rows of one head, four warps of 16 rows; keys pass by in tiles of Keys, the copy of V under Q K^T and that of the
// next K under P V. head_dim and v_head_dim up to Dqk and Dv, multiples of 8: what is missing counts as zeros.
#pragma once
#include "cuda/kernels/common/forward_task.cuh"
#include "cuda/kernels/common/next_tile.cuh"
#include "cuda/kernels/common/pages.cuh"

namespace attnjourney {

// Options: all that attention has (scores.cuh); without, scores are only scaled, by a positive number. Paged: packed
// rows over keys in pages (pages.cuh), without masks, of the sequences that have more rows than decoding takes.
template <class T_, int Dqk_, int Dv_, int Keys, bool Options = false, bool Paged = false>
struct Sm80Forward {
  using T = T_;
  static constexpr int kDqk = Dqk_, kDv = Dv_, kRows = 64, kKeys = Keys, kThreads = 128;
  static constexpr int kQueryBytes = kRows * kDqk * 2, kKeyBytes = kKeys * kDqk * 2, kValueBytes = kKeys * kDv * 2;
  static constexpr int kTileBytes = kQueryBytes + kKeyBytes + kValueBytes;
  using Window = TileWindow<kThreads>;
  using PageTiles = PagedTiles<kKeys>;
  using Pages = std::conditional_t<Paged, PagedKeys, NoPages>;
  static constexpr int kPagesAt = kTileBytes + (Options ? Window::kBytes : 0);
  static constexpr int kSmemBytes = kPagesAt + (Paged ? PageTiles::kBytes : 0);
  static constexpr bool kOptions = Options;
  static constexpr bool kKeepQuery = kDqk <= (Paged ? 0 : Options ? 64 : 128);  // in registers; more would spill
  static_assert(kDqk % 64 == 0 && kDv % 64 == 0 && kDv <= kDqk && (Options || !Paged));

  using Fragment = RowFragment<kKeys / 8>;

  // Rows of D elements in 16-byte chunks; the XOR spreads a column of chunks over the banks.
  template <int D>
  static __device__ __forceinline__ uint32_t chunk_at(uint32_t tile, int row, int chunk) {
    return tile + row * (D * 2) + ((chunk ^ (row & 7)) << 4);
  }

  template <int D>
  static __device__ __forceinline__ uint32_t chunk_in(int row, int chunk) {
    return chunk_at<D>(0, row, chunk);
  }

  // Starts the copy of rows [row0, row0 + Count) of one head; rows past the end and columns past `dim` become zeros.
  template <int D, int Count>
  static __device__ __forceinline__ void load_tile(uint32_t tile, const T* base, int64_t stride, int row0, int rows,
                                                   int dim) {
    const int tid = kKeepQuery ? threadIdx.x : ptx::opaque(threadIdx.x);
#pragma unroll
    for (int i = 0; i < Count * (D / 8) / kThreads; i++) {
      const int c = i * kThreads + tid, row = c / (D / 8), chunk = c % (D / 8);
      const bool valid = row0 + row < rows && chunk * 8 < dim;
      ptx::cp_async_16(chunk_at<D>(tile, row, chunk), base + (valid ? (row0 + row) * stride + chunk * 8 : 0), valid);
    }
    ptx::cp_async_commit();
  }

  static __device__ __forceinline__ Sequence sequence_at(const ForwardTask& p, int batch) {
    if constexpr (Paged)
      return paged_sequence(p, batch);
    else
      return sequence_of<Options>(p, batch);
  }

  template <bool Ranged>
  static __device__ __forceinline__ void run(const ForwardTask& p, const Pages& pages) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const ForwardTile where = Options ? packed_tile<kRows>(p, blockIdx.x) : forward_tile<kRows, Ranged>(p, blockIdx.x);
    const Sequence sequence = sequence_at(p, where.batch);
    if (Options && where.row >= sequence.rows) return;
    if constexpr (Paged)
      if (sequence.rows <= pages.few_rows) return;
    const Scores unmasked = unmasked_scores(p.scores);  // so that the compiler knows: registers for masks would spill
    const Scores& options = Paged ? unmasked : p.scores;
    const int row0 = where.row, head_k = where.head / p.group, row = row0 + warp * 16 + g;
    const KeyTiles tiles = key_tiles_of<kKeys, Ranged>(p, sequence, row0, row0 + kRows - 1);
    const KeyTiles own = key_tiles_of<kKeys, Ranged>(p, sequence, row0 + warp * 16, row0 + warp * 16 + 15);
    const auto head_of = [&](const void* base, const Strides& s, int head, int begin) {
      return static_cast<const T*>(base) + where.batch * s.batch + head * s.head + begin * s.row;
    };
    const T* query = head_of(p.query, p.query_strides, where.head, sequence.q_begin);
    const T* key = head_of(p.key, p.key_strides, head_k, sequence.k_begin);
    const T* value = head_of(p.value, p.value_strides, head_k, sequence.k_begin);
    unsigned char* smem = ptx::dynamic_smem();
    const uint32_t sq = ptx::smem_addr(smem), sk = sq + kQueryBytes, sv = sk + kKeyBytes;
    [[maybe_unused]] const PageTiles page_tiles{smem + kPagesAt};
    [[maybe_unused]] int turn = 0;  // of the tile at hand
    const auto load_k = [&](int n0) {
      if constexpr (Paged)
        load_pages<T, kDqk, kKeys, kThreads>(smem + kQueryBytes, key, pages.key_block, p.key_strides.row,
                                             page_tiles.places(turn), pages.key_dim, pages.chunked, chunk_in<kDqk>);
      else
        load_tile<kDqk, kKeys>(sk, key, p.key_strides.row, n0, tiles.key_end, p.head_dim);
    };

    const HeadScores scores(p, p.q_heads, where.batch, where.head);
    VisibleTile found;  // of the tile to come
    int flags_turn = 0;
    Window window{reinterpret_cast<uint32_t*>(smem + kTileBytes)};
    const KeyTileWalk<kRows, kKeys, float> walk{p, sequence, scores, tiles, own, row0, row};
    const auto next_visible = [&](int n) {
      if (!Options) return n;
      if constexpr (Paged) {  // located before the barrier
        if (n < tiles.end)
          found.seen = page_tiles.template seen_in<Fragment>(turn, lane % 4 * 2, seen_in_tile<Fragment>(n, walk));
        return n;
      }
      return next_visible_tile<Fragment, kThreads / 32>(n, found, p.scores, walk, window, window.found, flags_turn);
    };

    load_tile<kDqk, kRows>(sq, query, p.query_strides.row, row0, sequence.rows, p.head_dim);
    if constexpr (Paged) {
      page_tiles.locate(pages, where.batch, tiles.first(), turn, tiles.key_end);
      __syncthreads();  // @places_known
    }
    const int first_tile = next_visible(tiles.first());
    if (first_tile < tiles.end) load_k(first_tile * kKeys);

    float acc[kDv / 8][4] = {};
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.f, 0.f};
    if (Options && p.scores.sinks) {
      const float sink = p.scores.sinks[scores.index];
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (row + 8 * h < sequence.q_len && sink != -INFINITY) {
          row_max[h] = sink_score(p.scores, sink);
          row_sum[h] = t == 0 ? 1.f : 0.f;
        }
    }
    uint32_t qf[kKeepQuery ? kDqk / 16 : 1][4];
    int at = lane;
    const auto read_q = [&](uint32_t (&r)[4], int kk) {
      ptx::ldmatrix_x4(r, chunk_at<kDqk>(sq, warp * 16 + at % 16, kk * 2 + at / 16));
    };

    for (int n = first_tile, next; n < tiles.end; n = next) {
      const int n0 = n * kKeys;
      // hoisted out of the loop, addresses would spill
      if (!kKeepQuery) at = ptx::opaque(at);
      ptx::cp_async_wait<0>();  // @key_landed: K (and Q) of this tile have landed
      __syncthreads();          // @value_read: every warp is past V of the tile before
      if constexpr (Paged)
        load_pages<T, kDv, kKeys, kThreads>(smem + kQueryBytes + kKeyBytes, value, pages.value_block,
                                            p.value_strides.row, page_tiles.places(turn), pages.value_dim,
                                            pages.chunked, chunk_in<kDv>);
      else
        load_tile<kDv, kKeys>(sv, value, p.value_strides.row, n0, tiles.key_end, p.v_head_dim);
      if (kKeepQuery && n == first_tile) {
#pragma unroll
        for (int kk = 0; kk < kDqk / 16; kk++) read_q(qf[kk], kk);
      }

      float s[kKeys / 8][4] = {};
#pragma unroll
      for (int kk = 0; kk < kDqk / 16; kk++) {
        const int held = kKeepQuery ? kk : 0;
        if (!kKeepQuery) read_q(qf[0], kk);
#pragma unroll
        for (int j = 0; j < kKeys / 16; j++) {
          uint32_t b[4];
          ptx::ldmatrix_x4(b, chunk_at<kDqk>(sk, j * 16 + at % 8 + at / 16 * 8, kk * 2 + at / 8 % 2));
          ptx::mma_m16n8k16<T>(s[2 * j], qf[held], b[0], b[1]);
          ptx::mma_m16n8k16<T>(s[2 * j + 1], qf[held], b[2], b[3]);
        }
      }

      // Each thread holds rows g and g + 8 of its warp's 16: element e of s[j] is row g + 8 (e / 2), key 8 j + 2 t + e
      // % 2.
      bool border = !own.whole(n);
      if constexpr (Options) {
        const uint32_t shown =
            score<T, Fragment>(s, options, scores, p.score_scale, sequence.keys.offset, row, n0 + 2 * t, found.seen);
        border = ptx::any(shown != kAllSeen<Fragment>);
        softmax(s, acc, row_max, row_sum, options.exponent);
        if (options.seed) drop<Fragment>(s, options, scores, row, n0 + 2 * t);
      } else {
        if (border) hide<Ranged>(s, p, sequence, row, n0 + 2 * t);
        softmax(s, acc, row_max, row_sum, p.score_scale);
      }

      if constexpr (Paged) page_tiles.locate(pages, where.batch, tiles.above(n), turn ^ 1, tiles.key_end);
      ptx::cp_async_wait<0>();  // @value_landed
      __syncthreads();          // @key_read: by all warps
      turn ^= 1;
      next = next_visible(tiles.above(n));
      if (next < tiles.end) load_k(next * kKeys);
      const auto value_fragment = [&](uint32_t (&b)[4], int kk, int j, int at) {
        ptx::ldmatrix_x4_trans(b, chunk_at<kDv>(sv, kk * 16 + at % 16, j * 2 + at / 16));
      };
      const auto value_product = [&](auto&& product, int at) {
#pragma unroll
        for (int kk = 0; kk < kKeys / 16; kk++) {
          const float (&x)[4] = s[2 * kk], (&y)[4] = s[2 * kk + 1];
          const uint32_t a[4] = {ptx::pack2<T>(x[0], x[1]), ptx::pack2<T>(x[2], x[3]), ptx::pack2<T>(y[0], y[1]),
                                 ptx::pack2<T>(y[2], y[3])};
#pragma unroll
          for (int j = 0; j < kDv / 16; j++) {
            uint32_t b[4];
            value_fragment(b, kk, j, at);
            product(acc[2 * j], acc[2 * j + 1], a, b);
          }
        }
      };
      bool finite = true;
      if (Ranged && border) {
#pragma unroll 1
        for (int i = 0; i < kKeys / 16 * (kDv / 16); i++) {
          uint32_t b[4];
          value_fragment(b, i / (kDv / 16), i % (kDv / 16), ptx::opaque(lane));
          finite = finite && all_finite<T>(b);
        }
        finite = !ptx::any(!finite);
      }
      if (finite) {
        value_product(pair_mma<T>, at);
      } else {
        value_product(guarded_mma<T>, ptx::opaque(lane));
      }
    }
    ptx::cp_async_wait<0>();  // without any key tile, Q is still on its way
    if (first_tile >= tiles.end) __syncthreads();
    write(p, where, sequence, acc, row_max, row_sum, smem, sq);
  }

  // -inf for the keys that rows `row` and row + 8 do not see; key: that of s[0][0]
  template <bool Ranged>
  static __device__ __forceinline__ void hide(float (&s)[kKeys / 8][4], const ForwardTask& p, const Sequence& sequence,
                                              int row, int key) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      // opaque: found before the loop, a row's keys would spill
      const SeenKeys keys =
          (Ranged ? row_keys_of(sequence, ptx::opaque(row) + 8 * h) : SeenKeys{0, 0, p.kv_len}).from(key);
#pragma unroll
      for (int j = 0; j < kKeys / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (keys.hides(j * 8 + e)) s[j][2 * h + e] = -INFINITY;
    }
  }

  // Scores to probabilities of this tile; the sums and the output so far move to the new maximum. scale: of products,
  // or with options of differences of scores, to log2 units.
  static __device__ __forceinline__ void softmax(float (&s)[kKeys / 8][4], float (&acc)[kDv / 8][4],
                                                 float (&row_max)[2], float (&row_sum)[2], float scale) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float m = row_max[h];
#pragma unroll
      for (int j = 0; j < kKeys / 8; j++) m = fmaxf(m, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
      m = fmaxf(m, ptx::shfl_xor(m, 1));
      m = fmaxf(m, ptx::shfl_xor(m, 2));
      const auto unit = [&](float x) { return Options ? x : ptx::rounded_product(x, scale); };
      const float factor = Options ? scale : 1.f, base = m == -INFINITY ? 0.f : unit(m);
      const float alpha = ptx::exp2((unit(row_max[h]) - base) * factor);
      row_max[h] = m;
      row_sum[h] *= alpha;
      const auto weights = [&](auto&& exponent) {
#pragma unroll
        for (int j = 0; j < kKeys / 8; j++)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; e++) {
            s[j][e] = ptx::exp2(exponent(s[j][e]));
            row_sum[h] += s[j][e];
          }
      };
      if (Options || ptx::any(is_far(base)))
        weights([&](float x) { return (unit(x) - base) * factor; });
      else
        weights([&](float x) { return ptx::fma(x, scale, -base); });
#pragma unroll
      for (int j = 0; j < kDv / 8; j++) {
        acc[j][2 * h] *= alpha;
        acc[j][2 * h + 1] *= alpha;
      }
    }
  }

  // Normalises; each warp stages its 16 rows where its rows of Q were, and writes whole 16-byte chunks.
  static __device__ __forceinline__ void write(const ForwardTask& p, const ForwardTile& where, const Sequence& held,
                                               const float (&acc)[kDv / 8][4], const float (&row_max)[2],
                                               const float (&row_sum)[2], unsigned char* smem, uint32_t base) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t stage = base + warp * (16 * kDqk * 2);
    const int row0 = where.row + warp * 16;
    // recomputed where holding it through the loop would spill
    const Sequence sequence = kDqk == 192 ? sequence_at(p, where.batch) : held;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = row_sum[h];
      sum += ptx::shfl_xor(sum, 1);
      sum += ptx::shfl_xor(sum, 2);
      float inverse = sum == 0.f ? 0.f : 1.f / sum;
      if (Options && p.scores.seed) inverse *= p.scores.keep_scale;
      const int r = g + 8 * h;
#pragma unroll
      for (int j = 0; j < kDv / 8; j++)
        *reinterpret_cast<uint32_t*>(smem + (chunk_at<kDv>(stage, r, j) - base) + t * 4) =
            ptx::pack2<T>(acc[j][2 * h] * inverse, acc[j][2 * h + 1] * inverse);
      const float top = Options ? row_max[h] : ptx::rounded_product(row_max[h], p.score_scale);
      const int64_t first = Options && p.cu_q ? int64_t(where.head) * p.q_len + sequence.q_begin
                                              : (int64_t(where.batch) * p.q_heads + where.head) * p.q_len;
      if (t == 0 && row0 + r < sequence.rows)
        write_stats(p, first + row0 + r, top, sum, !Options || p.scores.unit != 1.f);
    }
    __syncwarp();
    T* out = static_cast<T*>(p.out) + where.batch * p.out_strides.batch + where.head * p.out_strides.head +
             sequence.q_begin * p.out_strides.row;
#pragma unroll
    for (int i = 0; i < kDv / 16; i++) {
      const int c = i * 32 + lane, r = c / (kDv / 8), chunk = c % (kDv / 8);
      if (row0 + r < sequence.rows && chunk * 8 < p.v_head_dim)
        *reinterpret_cast<uint4*>(out + (row0 + r) * p.out_strides.row + chunk * 8) =
            *reinterpret_cast<const uint4*>(smem + (chunk_at<kDv>(stage, r, chunk) - base));
    }
  }
};

// grid: total tiles
template <class Kernel, bool Ranged>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kOptions ? 2 : 0) sm80_forward(const ForwardTask p) {
  Kernel::template run<Ranged>(p, {});
}

// The same over pages. grid: total tiles
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 2)
    sm80_paged_forward(const __grid_constant__ ForwardTask p, const PagedKeys pages) {
  Kernel::template run<true>(p, pages);
}

}  // namespace attnjourney
