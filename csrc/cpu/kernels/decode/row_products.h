// The two products of a few rows with many: dot products with lanes over the dimension, and weighted sums with lanes
// over the columns. The many rows are read once, in their dtype.
#pragma once
#include "line_prefetch.h"

namespace attnjourney {
namespace {

// A vector of a row whose length need not be a multiple of W: the lanes past `n` are 0 and not
// read.
template <class T>
ATTN_NOINLINE Vec<Compute<T>> load_part(const T* p, int64_t n) {
  Compute<T> t[Vec<Compute<T>>::width] = {};
  for (int64_t i = 0; i < n; i++) t[i] = load_one(p + i);
  return load(t);
}

template <class T>
struct RowProducts {
  using C = Compute<T>;
  using V = Vec<C>;
  static constexpr int W = V::width;
  static constexpr int max_rows = 8;                          // rows that one pass over registers serves
  static constexpr int sums_at_once = W > 8 ? W : 8;          // dot products, one accumulator each
  static constexpr int pv_rows = Tuning::rows >= 8 ? 8 : 4;   // rows of P V in registers together
  static constexpr int pv_tile = Tuning::rows >= 8 ? 16 : 8;  // accumulators of P V

  static ATTN_INLINE int64_t padded(int64_t n) { return round_up(n, W); }

  // S[k][R]: dot products of R rows (q: row stride qd) with K keys, R * K = sums_at_once
  template <int R>
  static ATTN_INLINE void dot_tile(const C* q, int64_t qd, const T* key, int64_t k_row, int64_t dim, C* S,
                                   LinesAhead& ahead) {
    constexpr int K = sums_at_once / R;
    V a[sums_at_once];
    ATTN_UNROLL for (int i = 0; i < sums_at_once; i++) a[i] = V::zero();
    const int64_t whole = dim / W * W;
    if constexpr (R <= 4) {  // a key after the other, as they lie in memory
      ATTN_UNROLL for (int k = 0; k < K; k++) {
        ahead.step(dim / W);
        for (int64_t d = 0; d < whole; d += W) {
          const V x = load(key + k * k_row + d);
          ATTN_UNROLL for (int r = 0; r < R; r++) a[k * R + r] = fma(load(q + r * qd + d), x, a[k * R + r]);
        }
      }
    } else {
      ahead.step(K * (dim / W));
      _Pragma("GCC unroll 2") for (int64_t d = 0; d < whole; d += W) {
        if constexpr (R <= K) {
          V y[R];
          ATTN_UNROLL for (int r = 0; r < R; r++) y[r] = load(q + r * qd + d);
          ATTN_UNROLL for (int k = 0; k < K; k++) {
            const V x = load(key + k * k_row + d);
            ATTN_UNROLL for (int r = 0; r < R; r++) a[k * R + r] = fma(y[r], x, a[k * R + r]);
          }
        } else {
          V x[K];
          ATTN_UNROLL for (int k = 0; k < K; k++) x[k] = load(key + k * k_row + d);
          ATTN_UNROLL for (int r = 0; r < R; r++) {
            const V y = load(q + r * qd + d);
            ATTN_UNROLL for (int k = 0; k < K; k++) a[k * R + r] = fma(y, x[k], a[k * R + r]);
          }
        }
      }
    }
    if (whole < dim)
      for (int k = 0; k < K; k++) {
        const V x = load_part(key + k * k_row + whole, dim - whole);
        for (int r = 0; r < R; r++) a[k * R + r] = fma(load(q + r * qd + whole), x, a[k * R + r]);
      }
    ATTN_UNROLL for (int i = 0; i < sums_at_once; i += W) {
      V group[W];
      ATTN_UNROLL for (int j = 0; j < W; j++) group[j] = a[i + j];
      store(S + i, sums(group));
    }
  }

  template <int R>
  static ATTN_NOINLINE void scores(const C* q, int64_t qd, const T* key, int64_t k_row, int64_t dim, int64_t n, C* S,
                                   LinesAhead& ahead) {
    constexpr int K = sums_at_once / R;
    int64_t k = 0;
    for (; k + K <= n; k += K) dot_tile<R>(q, qd, key + k * k_row, k_row, dim, S + k * R, ahead);
    const int64_t whole = dim / W * W;
    for (; k < n; k++) {
      V a[R];
      ATTN_UNROLL for (int r = 0; r < R; r++) a[r] = V::zero();
      const T* x = key + k * k_row;
      for (int64_t d = 0; d < whole; d += W)
        ATTN_UNROLL for (int r = 0; r < R; r++) a[r] = fma(load(q + r * qd + d), load(x + d), a[r]);
      if (whole < dim) {
        const V tail = load_part(x + whole, dim - whole);
        ATTN_UNROLL for (int r = 0; r < R; r++) a[r] = fma(load(q + r * qd + whole), tail, a[r]);
      }
      ATTN_UNROLL for (int r = 0; r < R; r++) S[k * R + r] = sum(a[r]);
      ahead.step(dim / W);
    }
  }

  // O[r][N vectors] += sum over n keys of P[k * ldp + r] value[k]
  template <int R, int N>
  static ATTN_INLINE void pv_block(const C* P, int64_t ldp, int64_t n, const T* value, int64_t v_row, C* O, int64_t ldo,
                                   LinesAhead& ahead) {
    V a[R][N];
    ATTN_UNROLL for (int r = 0; r < R; r++) ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = V::zero();
    constexpr int together = R * N >= pv_tile ? 8 : 1;  // keys that one step is for
    _Pragma("GCC unroll 2") for (int64_t k = 0; k < n; k++, P += ldp, value += v_row) {
      if (k % together == 0) ahead.step(N * together);
      V x[N];
      ATTN_UNROLL for (int j = 0; j < N; j++) x[j] = load(value + W * j);
      ATTN_UNROLL for (int r = 0; r < R; r++) {
        const V s = V::broadcast(P + r);
        ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = fma(s, x[j], a[r][j]);
      }
    }
    // added after the products: sums that start from the total would round every product at its size
    ATTN_UNROLL for (int r = 0; r < R; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
        store(O + r * ldo + W * j, load(O + r * ldo + W * j) + a[r][j]);
  }
  template <int R>
  static ATTN_INLINE void pv_tail(const C* P, int64_t ldp, int64_t n, const T* value, int64_t v_row, int64_t left, C* O,
                                  int64_t ldo) {
    V a[R];
    ATTN_UNROLL for (int r = 0; r < R; r++) a[r] = V::zero();
    for (int64_t k = 0; k < n; k++) {
      const V x = load_part(value + k * v_row, left);
      ATTN_UNROLL for (int r = 0; r < R; r++) a[r] = fma(V::broadcast(P + k * ldp + r), x, a[r]);
    }
    ATTN_UNROLL for (int r = 0; r < R; r++) store(O + r * ldo, load(O + r * ldo) + a[r]);
  }
  template <int R, int N>
  static ATTN_INLINE void pv_columns(int64_t& d, int64_t whole, const C* P, int64_t ldp, int64_t n, const T* value,
                                     int64_t v_row, C* O, int64_t ldo, LinesAhead& ahead) {
    for (; d + N * W <= whole; d += N * W) pv_block<R, N>(P, ldp, n, value + d, v_row, O + d, ldo, ahead);
    if constexpr (N > 1) pv_columns<R, N / 2>(d, whole, P, ldp, n, value, v_row, O, ldo, ahead);
  }
  template <int R>
  static ATTN_NOINLINE void weighted_values(const C* P, int64_t n, const T* value, int64_t v_row, int64_t dim, C* O,
                                            int64_t ldo, LinesAhead& ahead) {
    constexpr int M = R < pv_rows ? R : pv_rows, N = pv_tile / M < 8 ? pv_tile / M : 8;
    for (int r = 0; r < R; r += M) {
      int64_t d = 0;
      const int64_t whole = dim / W * W;
      pv_columns<M, N>(d, whole, P + r, R, n, value, v_row, O + r * ldo, ldo, ahead);
      if (d < dim) pv_tail<M>(P + r, R, n, value + d, v_row, dim - d, O + r * ldo + d, ldo);
    }
  }
  // The same where a row may not see a value that is an inf or a NaN: a weight of exactly 0 hides it.
  static ATTN_NOINLINE void weighted_values_guarded(const C* P, int64_t rows, int64_t n, const T* value, int64_t v_row,
                                                    int64_t dim, C* O, int64_t ldo) {
    for (int64_t k = 0; k < n; k++)
      for (int64_t r = 0; r < rows; r++) {
        const C w = P[k * rows + r];
        if (w == C(0)) continue;
        for (int64_t d = 0; d < dim; d++) O[r * ldo + d] += w * load_one(value + k * v_row + d);
      }
  }
};

}  // namespace
}  // namespace attnjourney
