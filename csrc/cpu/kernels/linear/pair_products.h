// The products of linear attention's backward on pairs of bfloat16, for bfloat16 inputs: what is multiplied is rounded
// while it is packed, sums are float32.
#pragma once
#include "backward.h"

namespace attnjourney {
namespace {

struct DotProducts {
  static constexpr int W = Vf::width;

  static int64_t space(const LinearParams& p) {
    const int64_t most = round_up(max_of(max_of(p.head_dim, p.v_head_dim), Tuning::linear_chunk), 2 * W);
    return 2 * (most / 2) * most;
  }

  // rows x of X -> [x / 2][cols], the numbers of rows x and x + 1 side by side; 0 beyond the last
  static ATTN_INLINE void pack_pairs(const float* X, int64_t ld, int64_t rows, int64_t cols, uint32_t* to) {
    for (int64_t x = 0; x < rows; x += 2, X += 2 * ld, to += cols)
      for (int64_t c = 0; c < cols; c += W)
        store_pairs(to + c, round_pairs(load(X + c), x + 1 < rows ? load(X + ld + c) : Vf::zero()));
  }
  // the rows themselves, [rows][cols / 2]
  static ATTN_INLINE void pack_rows(const float* X, int64_t ld, int64_t rows, int64_t cols, uint32_t* to) {
    for (int64_t r = 0; r < rows; r++, X += ld, to += cols / 2)
      for (int64_t c = 0; c < cols; c += 2 * W) store_pairs(to + c / 2, round_neighbours(load(X + c), load(X + c + W)));
  }

  // as multiply of band.h. A(r, x) is 0 for one more x on either side of what a band takes.
  template <bool columns>
  static ATTN_NOINLINE void multiply(const float* A, int64_t lda, const float* B, int64_t ldb, int64_t n, int64_t rows,
                                     int64_t cols, Band band, bool add, float* out, int64_t ldo, float* also,
                                     Ahead* ahead, float* packs) {
    uint32_t *const b = reinterpret_cast<uint32_t*>(packs), *const a = b + (n + 1) / 2 * cols;
    const int64_t a_ld = columns ? round_up(rows, W) : round_up(n, 2 * W) / 2;
    pack_pairs(B, ldb, n, cols, b);
    if constexpr (columns)
      pack_pairs(A, lda, n, a_ld, a);
    else
      pack_rows(A, lda, rows, 2 * a_ld, a);
    split_rows<Tuning::linear_rows>(rows, [&](int64_t r, auto n_rows) {
      constexpr int M = decltype(n_rows)::count;
      const int64_t begin = band == Band::from_row ? r / 2 : 0;
      const int64_t end = ((band == Band::to_row ? min_of(n, r + M) : n) + 1) / 2;
      const int64_t left = band == Band::upper ? r / W * W : 0;
      if (ahead) ahead->step();
      split_vectors<Tuning::linear_vectors>((cols - left) / W, [&](int64_t v, auto n_vectors) {
        constexpr int N = decltype(n_vectors)::count;
        const int64_t c = left + v * W;
        Tile<float, M, N> t;
        t.clear();
        _Pragma("GCC unroll 2") for (int64_t x = begin; x < end; x++) {
          Pairs y[N];
          ATTN_UNROLL for (int j = 0; j < N; j++) y[j] = load_pairs(b + x * cols + c + W * j);
          ATTN_UNROLL for (int i = 0; i < M; i++) {
            const Pairs s = broadcast_pair(columns ? a + x * a_ld + r + i : a + (r + i) * a_ld + x);
            ATTN_UNROLL for (int j = 0; j < N; j++) t.a[i][j] = dot(t.a[i][j], s, y[j]);
          }
        }
        if (also) [[unlikely]] {
          Tile<float, M, N> u = t;
          u.add(also + r * ldo + c, ldo);
          u.store_to(also + r * ldo + c, ldo);
        }
        if (add) t.add(out + r * ldo + c, ldo);
        t.store_to(out + r * ldo + c, ldo);
      });
    });
  }
};

}  // namespace
}  // namespace attnjourney
