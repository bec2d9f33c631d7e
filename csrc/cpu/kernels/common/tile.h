// Register tiles: the matrix products of every kernel, and how rows are split into tiles.
#pragma once
#include "common.h"
#include "cpu/tuning.h"

namespace attnjourney {
namespace {

// M rows times N vectors of accumulators.
template <class Real, int M, int N>
struct Tile {
  Vec<Real> acc[M][N];

  ATTN_INLINE void clear() {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) acc[r][j] = Vec<Real>::zero();
  }
  // Added after the products: sums that start from the total would round every product at its size.
  ATTN_INLINE void add(const Real* from, int64_t ld) {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) acc[r][j] =
        acc[r][j] + load(from + r * ld + Vec<Real>::width * j);
  }
  ATTN_INLINE void store_to(Real* to, int64_t ld) const {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
        store(to + r * ld + Vec<Real>::width * j, acc[r][j]);
  }
  ATTN_INLINE void load_from(const Real* from, int64_t ld) {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) acc[r][j] =
        load(from + r * ld + Vec<Real>::width * j);
  }
  // the numbers through f(Real (&x)[M * N * width]), in memory; x[(r * N + j) * width + lane]
  template <class F>
  ATTN_INLINE void through(const F& f) {
    constexpr int width = Vec<Real>::width;
    alignas(64) Real x[M * N * width];
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
        store(x + (r * N + j) * width, acc[r][j]);
    f(x);
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) acc[r][j] =
        load(x + (r * N + j) * width);
  }
  // acc[r][j] += sum_x left[r * left_ld + x] * right[x * right_ld + width j]: rows of left broadcast, x along them
  ATTN_INLINE void add_rows(const Real* left, int64_t left_ld, const Real* right, int64_t right_ld, int64_t n) {
    _Pragma("GCC unroll 4") for (int64_t x = 0; x < n; x++, right += right_ld) {
      Vec<Real> column[N];
      ATTN_UNROLL for (int j = 0; j < N; j++) column[j] = load(right + Vec<Real>::width * j);
      ATTN_UNROLL for (int r = 0; r < M; r++) {
        const Vec<Real> factor = Vec<Real>::broadcast(left + r * left_ld + x);
        ATTN_UNROLL for (int j = 0; j < N; j++) acc[r][j] = fma(factor, column[j], acc[r][j]);
      }
    }
  }
  // acc[r][j] += sum_x left[x * left_ld + r] * right[x * right_ld + width j]: columns of left broadcast, contiguous in
  // r
  ATTN_INLINE void add_columns(const Real* left, int64_t left_ld, const Real* right, int64_t right_ld, int64_t n) {
    _Pragma("GCC unroll 2") for (int64_t x = 0; x < n; x++, right += right_ld, left += left_ld) {
      Vec<Real> column[N];
      ATTN_UNROLL for (int j = 0; j < N; j++) column[j] = load(right + Vec<Real>::width * j);
      ATTN_UNROLL for (int r = 0; r < M; r++) {
        const Vec<Real> factor = Vec<Real>::broadcast(left + r);
        ATTN_UNROLL for (int j = 0; j < N; j++) acc[r][j] = fma(factor, column[j], acc[r][j]);
      }
    }
  }
};

// The same sums where the right side holds an inf or a NaN: a weight of exactly 0 hides it.
// out[r][.] += sum_x left[x * sx + r * sr] * right[x]
template <class Real>
ATTN_NOINLINE void add_guarded(const Real* left, int64_t sx, int64_t sr, int64_t rows, const Real* right,
                               int64_t right_ld, int64_t n, int64_t cols, Real* out, int64_t out_ld) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t x = 0; x < n; x++) {
      const Real weight = left[x * sx + r * sr];
      if (weight == Real(0)) continue;
      for (int64_t d = 0; d < cols; d++)
        out[r * out_ld + d] = fma(weight, right[x * right_ld + d], out[r * out_ld + d]);
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

// calls f(first, Rows<p>) for pieces of m < 2 Most rows: powers of two, the largest first
template <int Most, class F>
ATTN_INLINE void in_powers(int64_t m, F&& f, int64_t first = 0) {
  if (m & Most) f(first, Rows<Most>{});
  if constexpr (Most > 1) in_powers<Most / 2>(m, static_cast<F&&>(f), first + (m & Most));
}

// Sums of rows [m][left_ld] with the columns right [n][right_ld], n <= N vectors wide, in memory: for tiles of fewer
// than Max rows or N vectors, which what follows then takes a row at a time. So that no product is compiled for every
// number of rows and vectors together with every epilogue.
template <class Real, int Max, int N>
struct RowSums {
  static constexpr int64_t ld = N * Vec<Real>::width;
  alignas(64) Real sums[Max * ld];

  // the sum of up to `count` products, of which those without a left side count nothing
  ATTN_NOINLINE void multiply(int64_t m, int64_t n, int count, const Real* const* left, int64_t left_ld,
                              const Real* const* right, int64_t right_offset, int64_t right_ld, int64_t dim) {
    with_rows<Max>(m, [&](auto m_) {
      with_rows<N>(n, [&](auto n_) {
        Tile<Real, m_.count, n_.count> tile;
        tile.clear();
        for (int i = 0; i < count; i++)
          if (left[i]) tile.add_rows(left[i], left_ld, right[i] + right_offset, right_ld, dim);
        tile.store_to(sums, ld);
      });
    });
  }
  // f(row, its sums) for each of m rows
  template <class F>
  ATTN_INLINE void each_row(int64_t m, int64_t n, const F& f) const {
    with_rows<N>(n, [&](auto n_) {
      for (int64_t r = 0; r < m; r++) {
        Tile<Real, 1, n_.count> row;
        row.load_from(sums + r * ld, ld);
        f(r, row);
      }
    });
  }
};

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

// The tile of sums over keys or queries: of a few more columns and fewer rows, where they divide the columns evenly.
template <int M, int N>
struct TileShape {
  static constexpr int rows = M, vectors = N;
};
template <class Real, class F>
ATTN_INLINE void with_sum_tiles(int64_t columns, F&& f) {
  if constexpr (Tuning::wide_vectors != Tuning::vectors)
    if (machine_tuning.wide_sums && columns % (Tuning::wide_vectors * Vec<Real>::width) == 0)
      return f(TileShape<Tuning::wide_rows, Tuning::wide_vectors>{});
  f(TileShape<Tuning::rows, Tuning::vectors>{});
}

// calls f(first column, Rows<vectors>) over cols (a multiple of the vector width), N vectors at a time. No single
// vector is left over where two pairs do: a tile one vector wide loads a broadcast for every product.
template <class Real, int N, class F>
ATTN_INLINE void split_columns(int64_t cols, F&& f) {
  constexpr int width = Vec<Real>::width;
  int64_t d = 0;
  while (d < cols) {
    const int64_t left = (cols - d) / width;
    if constexpr (N > 2) {
      if (left == N + 1 || (left == 2)) {
        f(d, Rows<2>{});
        d += 2 * width;
        continue;
      }
    }
    if (left >= N) {
      f(d, Rows<N>{});
      d += N * width;
    } else {
      f(d, Rows<1>{});
      d += width;
    }
  }
}

}  // namespace
}  // namespace attnjourney
