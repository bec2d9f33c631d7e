// Register tiles: the matrix products of every kernel, and how rows are split into tiles.
#pragma once
#include "common.h"

namespace attnjourney {
namespace {

// M rows times N vectors of accumulators.
template <class C, int M, int N>
struct Tile {
  Vec<C> a[M][N];

  ATTN_INLINE void clear() {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = Vec<C>::zero();
  }
  // Added after the products: sums that start from the total would round every product at its size.
  ATTN_INLINE void add(const C* c, int64_t ld) {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] =
        a[r][j] + load(c + r * ld + Vec<C>::width * j);
  }
  ATTN_INLINE void store_to(C* c, int64_t ld) const {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
        store(c + r * ld + Vec<C>::width * j, a[r][j]);
  }
  // the numbers through f(C (&x)[M * N * W]), in memory; x[(r * N + j) * W + lane]
  template <class F>
  ATTN_INLINE void through(const F& f) {
    constexpr int W = Vec<C>::width;
    alignas(64) C x[M * N * W];
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) store(x + (r * N + j) * W, a[r][j]);
    f(x);
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = load(x + (r * N + j) * W);
  }
  // a[r][j] += sum_x A[r * lda + x] * B[x * ldb + W j]: rows of A broadcast, x along them
  ATTN_INLINE void add_rows(const C* A, int64_t lda, const C* B, int64_t ldb, int64_t n) {
    _Pragma("GCC unroll 4") for (int64_t x = 0; x < n; x++, B += ldb) {
      Vec<C> b[N];
      ATTN_UNROLL for (int j = 0; j < N; j++) b[j] = load(B + Vec<C>::width * j);
      ATTN_UNROLL for (int r = 0; r < M; r++) {
        const Vec<C> s = Vec<C>::broadcast(A + r * lda + x);
        ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = fma(s, b[j], a[r][j]);
      }
    }
  }
  // a[r][j] += sum_x A[x * lda + r] * B[x * ldb + W j]: columns of A broadcast, contiguous in r
  ATTN_INLINE void add_columns(const C* A, int64_t lda, const C* B, int64_t ldb, int64_t n) {
    _Pragma("GCC unroll 2") for (int64_t x = 0; x < n; x++, B += ldb, A += lda) {
      Vec<C> b[N];
      ATTN_UNROLL for (int j = 0; j < N; j++) b[j] = load(B + Vec<C>::width * j);
      ATTN_UNROLL for (int r = 0; r < M; r++) {
        const Vec<C> s = Vec<C>::broadcast(A + r);
        ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = fma(s, b[j], a[r][j]);
      }
    }
  }
};

// The same sums where B holds an inf or a NaN: a weight of exactly 0 hides it. a[r][.] += sum_x A[x*sx + r*sr] * B[x]
template <class C>
ATTN_NOINLINE void add_guarded(const C* A, int64_t sx, int64_t sr, int64_t rows, const C* B, int64_t ldb, int64_t n,
                               int64_t cols, C* out, int64_t ldo) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t x = 0; x < n; x++) {
      const C w = A[x * sx + r * sr];
      if (w == C(0)) continue;
      for (int64_t d = 0; d < cols; d++) out[r * ldo + d] = fma(w, B[x * ldb + d], out[r * ldo + d]);
    }
}

template <int M>
struct Rows {
  static constexpr int count = M;
};

// calls f(Rows<m>) for a run-time m of 1..Max
template <int Max, class F>
ATTN_INLINE void with_rows(int64_t m, F&& f) {
  if constexpr (Max == 1)
    f(Rows<1>{});
  else if (m >= Max)
    f(Rows<Max>{});
  else
    with_rows<Max - 1>(m, static_cast<F&&>(f));
}

// calls f(first, Rows<m>) for pieces of n rows, Max at a time; the rest is shared out so that no tiny piece is left
template <int Max, class F>
ATTN_INLINE void split_rows(int64_t n, F&& f) {
  int64_t first = 0;
  while (n - first >= 2 * Max || n - first == Max) {
    f(first, Rows<Max>{});
    first += Max;
  }
  const int64_t rest = n - first;  // 0 .. 2 Max - 1, not Max
  if (rest > Max) {
    const int64_t half = rest - Max >= (2 * Max + 2) / 3 ? Max : (rest + 1) / 2;
    with_rows<Max>(half, [&](auto m) { f(first, m); });
    first += half;
  }
  if (n > first) with_rows<Max>(n - first, [&](auto m) { f(first, m); });
}

// calls f(first column, Rows<vectors>) over cols (a multiple of the vector width), N vectors at a time. No single
// vector is left over where two pairs do: a tile one vector wide loads a broadcast for every product.
template <class C, int N, class F>
ATTN_INLINE void split_columns(int64_t cols, F&& f) {
  constexpr int W = Vec<C>::width;
  int64_t d = 0;
  while (d < cols) {
    const int64_t left = (cols - d) / W;
    if constexpr (N > 2) {
      if (left == N + 1 || (left == 2)) {
        f(d, Rows<2>{});
        d += 2 * W;
        continue;
      }
    }
    if (left >= N) {
      f(d, Rows<N>{});
      d += N * W;
    } else {
      f(d, Rows<1>{});
      d += W;
    }
  }
}

}  // namespace
}  // namespace attnjourney
