// Products of a chunk of rows with itself, and triangular systems. Row i has entries for rows j <= i (or j < i) alone:
// what lies on the other side of the diagonal is neither computed nor read, so that a NaN of a later row cannot come
// into an earlier one.
#pragma once
#include "cpu/kernels/attention/band.h"
#include "cpu/kernels/common/tile.h"

namespace attnjourney {
namespace {

// calls f(first row, Rows<m>, first column, Rows<vectors>) for register tiles over rows x cols
template <class Real, class F>
ATTN_INLINE void each_tile(int64_t rows, int64_t cols, F&& f) {
  split_rows<Tuning::linear_rows>(rows, [&](int64_t r, auto m) {
    split_vectors<Tuning::linear_vectors>(cols / Vec<Real>::width,
                                          [&](int64_t v, auto n) { f(r, m, v * Vec<Real>::width, n); });
  });
}

// out[i][j] = sum_d left[i][d] right[d][j] for j <= i; other columns of a vector may be written with anything
template <class Real>
ATTN_NOINLINE void multiply_lower(const Real* left, int64_t left_ld, const Real* right, int64_t right_ld, int64_t depth,
                                  int64_t rows, Real* out, int64_t out_ld) {
  constexpr int width = Vec<Real>::width;
  split_rows<Tuning::linear_rows>(rows, [&](int64_t r, auto m) {
    const int64_t cols = round_up(r + m.count, width);
    split_vectors<Tuning::linear_vectors>(cols / width, [&](int64_t v, auto n) {
      Tile<Real, m.count, n.count> sums;
      sums.clear();
      sums.add_rows(left + r * left_ld, left_ld, right + v * width, right_ld, depth);
      sums.store_to(out + r * out_ld + v * width, out_ld);
    });
  });
}

// out[i] (+)= sum over j <= i (strict: j < i) of lower[i][j] rows[j]
template <bool strict, class Real>
ATTN_NOINLINE void multiply_triangle(const Real* lower, int64_t ld, const Real* rows, int64_t rows_ld, int64_t n,
                                     int64_t cols, bool add, Real* out, int64_t out_ld) {
  each_tile<Real>(n, cols, [&](int64_t r, auto m, int64_t c, auto vectors) {
    constexpr int M = m.count, N = vectors.count;
    Tile<Real, M, N> sums;
    sums.clear();
    sums.add_rows(lower + r * ld, ld, rows + c, rows_ld, r);
    ATTN_UNROLL for (int j = 0; j < M; j++) {
      Vec<Real> right[N];
      ATTN_UNROLL for (int v = 0; v < N; v++) right[v] = load(rows + (r + j) * rows_ld + c + v * Vec<Real>::width);
      ATTN_UNROLL for (int i = 0; i < M; i++) {
        if (strict ? i <= j : i < j) continue;
        const Vec<Real> factor = Vec<Real>::broadcast(lower + (r + i) * ld + r + j);
        ATTN_UNROLL for (int v = 0; v < N; v++) sums.acc[i][v] = fma(factor, right[v], sums.acc[i][v]);
      }
    }
    if (add) sums.add(out + r * out_ld + c, out_ld);
    sums.store_to(out + r * out_ld + c, out_ld);
  });
}

// out[j] += sum over i >= j (strict: i > j) of lower[i][j] rows[i]
template <bool strict, class Real>
ATTN_NOINLINE void multiply_triangle_transposed(const Real* lower, int64_t ld, const Real* rows, int64_t rows_ld,
                                                int64_t n, int64_t cols, Real* out, int64_t out_ld) {
  each_tile<Real>(n, cols, [&](int64_t r, auto m, int64_t c, auto vectors) {
    constexpr int M = m.count, N = vectors.count;
    Tile<Real, M, N> sums;
    sums.clear();
    ATTN_UNROLL for (int i = 0; i < M; i++) {
      Vec<Real> right[N];
      ATTN_UNROLL for (int v = 0; v < N; v++) right[v] = load(rows + (r + i) * rows_ld + c + v * Vec<Real>::width);
      ATTN_UNROLL for (int j = 0; j < M; j++) {
        if (strict ? i <= j : i < j) continue;
        const Vec<Real> factor = Vec<Real>::broadcast(lower + (r + i) * ld + r + j);
        ATTN_UNROLL for (int v = 0; v < N; v++) sums.acc[j][v] = fma(factor, right[v], sums.acc[j][v]);
      }
    }
    const int64_t below = r + M;
    sums.add_columns(lower + below * ld + r, ld, rows + below * rows_ld + c, rows_ld, n - below);
    sums.add(out + r * out_ld + c, out_ld);
    sums.store_to(out + r * out_ld + c, out_ld);
  });
}

// (1 + strict lower) x = rows in place: rows[i] -= sum over j < i of lower[i][j] rows[j]
template <class Real>
ATTN_NOINLINE void solve_triangle(const Real* lower, int64_t ld, int64_t n, int64_t cols, Real* rows, int64_t rows_ld) {
  const Vec<Real> minus = Vec<Real>::set(Real(-1));
  each_tile<Real>(n, cols, [&](int64_t r, auto m, int64_t c, auto vectors) {
    constexpr int M = m.count, N = vectors.count;
    Real* const x = rows + r * rows_ld + c;
    Tile<Real, M, N> known;
    known.clear();
    known.add_rows(lower + r * ld, ld, rows + c, rows_ld, r);
    ATTN_UNROLL for (int i = 0; i < M; i++) ATTN_UNROLL for (int v = 0; v < N; v++) known.acc[i][v] =
        fma(minus, known.acc[i][v], load(x + i * rows_ld + v * Vec<Real>::width));
    ATTN_UNROLL for (int j = 0; j < M; j++) ATTN_UNROLL for (int i = 0; i < M; i++) {
      if (i <= j) continue;
      const Vec<Real> factor = minus * Vec<Real>::broadcast(lower + (r + i) * ld + r + j);
      ATTN_UNROLL for (int v = 0; v < N; v++) known.acc[i][v] = fma(factor, known.acc[j][v], known.acc[i][v]);
    }
    known.store_to(x, rows_ld);
  });
}

// (1 + strict lower)^T x = rows in place: rows[j] -= sum over i > j of lower[i][j] rows[i], from the last row up
template <class Real>
ATTN_NOINLINE void solve_triangle_transposed(const Real* lower, int64_t ld, int64_t n, int64_t cols, Real* rows,
                                             int64_t rows_ld) {
  const Vec<Real> minus = Vec<Real>::set(Real(-1));
  for (int64_t end = n, r; end > 0; end = r) {
    r = max_of(0, end - Tuning::linear_rows);
    with_rows<Tuning::linear_rows>(end - r, [&](auto m) {
      split_vectors<Tuning::linear_vectors>(cols / Vec<Real>::width, [&](int64_t first, auto vectors) {
        constexpr int M = m.count, N = vectors.count;
        const int64_t c = first * Vec<Real>::width;
        Real* const x = rows + r * rows_ld + c;
        Tile<Real, M, N> known;
        known.clear();
        known.add_columns(lower + end * ld + r, ld, rows + end * rows_ld + c, rows_ld, n - end);
        ATTN_UNROLL for (int j = 0; j < M; j++) ATTN_UNROLL for (int v = 0; v < N; v++) known.acc[j][v] =
            fma(minus, known.acc[j][v], load(x + j * rows_ld + v * Vec<Real>::width));
        ATTN_UNROLL for (int i = M - 1; i >= 0; i--) ATTN_UNROLL for (int j = 0; j < M; j++) {
          if (i <= j) continue;
          const Vec<Real> factor = minus * Vec<Real>::broadcast(lower + (r + i) * ld + r + j);
          ATTN_UNROLL for (int v = 0; v < N; v++) known.acc[j][v] = fma(factor, known.acc[i][v], known.acc[j][v]);
        }
        known.store_to(x, rows_ld);
      });
    });
  }
}

}  // namespace
}  // namespace attnjourney
