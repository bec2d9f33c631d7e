// The products of linear attention's backward on pairs of bfloat16, for bfloat16 inputs: what is multiplied is rounded
// while it is packed, sums are float32.
#pragma once
#include "backward.h"

namespace attnjourney {
namespace {

struct ChunkPairProducts {
  static constexpr int width = Vf::width;

  // what is multiplied, rounded: columns along the rows of a product, and what they are broadcast against
  struct Buffers {
    uint32_t* left = nullptr;
    uint32_t* right = nullptr;
    Buffers() = default;
    Buffers(const LinearParams& params, Scratch& scratch) {
      const int64_t most =
          round_up(max_of(max_of(params.head_dim, params.v_head_dim), Tuning::linear_chunk), 2 * width);
      left = scratch.take<uint32_t>(most / 2 * most);
      right = scratch.take<uint32_t>(most / 2 * most);
    }
  };

  // rows x of matrix -> [x / 2][cols], the numbers of rows x and x + 1 side by side; 0 beyond the last
  static ATTN_INLINE void pack_pairs(const float* matrix, int64_t ld, int64_t rows, int64_t cols, uint32_t* to) {
    for (int64_t x = 0; x < rows; x += 2, matrix += 2 * ld, to += cols)
      for (int64_t c = 0; c < cols; c += width)
        store_pairs(to + c, round_pairs(load(matrix + c), x + 1 < rows ? load(matrix + ld + c) : Vf::zero()));
  }
  // the rows themselves, [rows][cols / 2]
  static ATTN_INLINE void pack_rows(const float* matrix, int64_t ld, int64_t rows, int64_t cols, uint32_t* to) {
    for (int64_t r = 0; r < rows; r++, matrix += ld, to += cols / 2)
      for (int64_t c = 0; c < cols; c += 2 * width)
        store_pairs(to + c / 2, round_neighbours(load(matrix + c), load(matrix + c + width)));
  }

  // as multiply of band.h. A(r, x) is 0 for one more x on either side of what a band takes.
  template <bool columns>
  static ATTN_NOINLINE void multiply(const float* left, int64_t left_ld, const float* right, int64_t right_ld,
                                     int64_t n, int64_t rows, int64_t cols, Band band, bool add, float* out,
                                     int64_t out_ld, float* also, RowPrefetch* prefetch, const Buffers& buffers) {
    uint32_t *const left_pairs = buffers.left, *const right_pairs = buffers.right;
    const int64_t pairs_ld = columns ? round_up(rows, width) : round_up(n, 2 * width) / 2;
    pack_pairs(right, right_ld, n, cols, right_pairs);
    if constexpr (columns)
      pack_pairs(left, left_ld, n, pairs_ld, left_pairs);
    else
      pack_rows(left, left_ld, rows, 2 * pairs_ld, left_pairs);
    split_rows<Tuning::linear_rows>(rows, [&](int64_t r, auto n_rows) {
      constexpr int M = decltype(n_rows)::count;
      const int64_t begin = band == Band::from_row ? r / 2 : 0;
      const int64_t end = ((band == Band::to_row ? min_of(n, r + M) : n) + 1) / 2;
      const int64_t left = band == Band::upper ? r / width * width : 0;
      if (prefetch) prefetch->step();
      split_vectors<Tuning::linear_vectors>((cols - left) / width, [&](int64_t v, auto n_vectors) {
        constexpr int N = decltype(n_vectors)::count;
        const int64_t c = left + v * width;
        Tile<float, M, N> sums;
        sums.clear();
        _Pragma("GCC unroll 2") for (int64_t x = begin; x < end; x++) {
          Pairs column[N];
          ATTN_UNROLL for (int j = 0; j < N; j++) column[j] = load_pairs(right_pairs + x * cols + c + width * j);
          ATTN_UNROLL for (int i = 0; i < M; i++) {
            const PairForAll factor =
                broadcast_pair(columns ? left_pairs + x * pairs_ld + r + i : left_pairs + (r + i) * pairs_ld + x);
            ATTN_UNROLL for (int j = 0; j < N; j++) sums.acc[i][j] = dot_pairs(sums.acc[i][j], factor, column[j]);
          }
        }
        if (also) [[unlikely]] {
          Tile<float, M, N> total = sums;
          total.add(also + r * out_ld + c, out_ld);
          total.store_to(also + r * out_ld + c, out_ld);
        }
        if (add) sums.add(out + r * out_ld + c, out_ld);
        sums.store_to(out + r * out_ld + c, out_ld);
      });
    });
  }
};

}  // namespace
}  // namespace attnjourney
