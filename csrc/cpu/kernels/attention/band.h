// Products of a chunk of a causal sequence with itself: one side of the diagonal is neither computed nor read.
#pragma once
#include "cpu/kernels/common/row_prefetch.h"
#include "cpu/kernels/common/tile.h"

namespace attnjourney {

// what row r of a product out[r][c] = sum_x left(r, x) right[x][c] takes
enum class Band {
  full,
  upper,     // all x, but only columns c >= r of out are wanted
  to_row,    // x <= r: left(r, x) is 0 where x > r
  from_row,  // x >= r: left(r, x) is 0 where x < r
};

namespace {

// calls f(first, Rows<n>) for pieces of `count` vectors, Max at a time, without a single one left over
template <int Max, class F>
ATTN_INLINE void split_vectors(int64_t count, F&& f) {
  for (int64_t v = 0; v < count;) {
    const int64_t left = count - v, n = left > Max && left < 2 * Max ? (left + 1) / 2 : min_of(left, Max);
    with_rows<Max>(n, [&](auto n_) { f(v, n_); });
    v += n;
  }
}

}  // namespace
inline namespace ATTN_ISA {

// out[r][c] (+)= sum over x < n. left(r, x) is left[r * left_ld + x], or left[x * left_ld + r] where `columns`. cols is
// a multiple of the vector width. What is added goes to `also` too, where there is one.
template <bool columns, class Real>
ATTN_NOINLINE void multiply(const Real* left, int64_t left_ld, const Real* right, int64_t right_ld, int64_t n,
                            int64_t rows, int64_t cols, Band band, bool add, Real* out, int64_t out_ld,
                            Real* also = nullptr, RowPrefetch* prefetch = nullptr) {
  split_rows<Tuning::linear_rows>(rows, [&](int64_t r, auto n_rows) {
    constexpr int M = decltype(n_rows)::count;
    const int64_t begin = band == Band::from_row ? r : 0;
    const int64_t count = (band == Band::to_row ? min_of(n, r + M) : n) - begin;
    const int64_t first = band == Band::upper ? r / Vec<Real>::width * Vec<Real>::width : 0;
    if (prefetch) prefetch->step();
    split_vectors<Tuning::linear_vectors>((cols - first) / Vec<Real>::width, [&](int64_t v, auto n_vectors) {
      constexpr int N = decltype(n_vectors)::count;
      const int64_t c = first + v * Vec<Real>::width;
      Tile<Real, M, N> sums;
      sums.clear();
      if constexpr (columns)
        sums.add_columns(left + begin * left_ld + r, left_ld, right + begin * right_ld + c, right_ld, count);
      else
        sums.add_rows(left + r * left_ld + begin, left_ld, right + begin * right_ld + c, right_ld, count);
      if (also) [[unlikely]] {
        Tile<Real, M, N> total = sums;
        total.add(also + r * out_ld + c, out_ld);
        total.store_to(also + r * out_ld + c, out_ld);
      }
      if (add) sums.add(out + r * out_ld + c, out_ld);
      sums.store_to(out + r * out_ld + c, out_ld);
    });
  });
}

}  // namespace ATTN_ISA
namespace {

// The same sums over to_row or from_row, added, where right holds an inf or a NaN: what is hidden is not read.
template <bool columns, class Real>
ATTN_NOINLINE void multiply_guarded(const Real* left, int64_t left_ld, const Real* right, int64_t right_ld, int64_t n,
                                    int64_t rows, int64_t cols, Band band, Real* out, int64_t out_ld) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t x = band == Band::from_row ? r : 0; x < (band == Band::to_row ? min_of(n, r + 1) : n); x++) {
      const Real weight = columns ? left[x * left_ld + r] : left[r * left_ld + x];
      for (int64_t c = 0; c < cols; c++)
        out[r * out_ld + c] = fma(weight, right[x * right_ld + c], out[r * out_ld + c]);
    }
}

// added by whichever of the two is right
template <bool columns, class Real>
ATTN_INLINE void multiply_band(const Real* left, int64_t left_ld, const Real* right, int64_t right_ld, int64_t n,
                               int64_t rows, int64_t cols, Band band, bool finite, Real* out, int64_t out_ld,
                               RowPrefetch* prefetch = nullptr) {
  if (finite)
    multiply<columns>(left, left_ld, right, right_ld, n, rows, cols, band, true, out, out_ld,
                      static_cast<Real*>(nullptr), prefetch);
  else
    multiply_guarded<columns>(left, left_ld, right, right_ld, n, rows, cols, band, out, out_ld);
}

// matrix[r][c] of an `upper` product: `plus`[c] added (where given), then 0 where c < r as far as a band product reads
template <class Real>
ATTN_NOINLINE void clear_below_diagonal(Real* matrix, int64_t ld, int64_t rows, int64_t cols, const Real* plus) {
  constexpr int width = Vec<Real>::width;
  for (int64_t r = 0; r < rows; r++) {
    Real* x = matrix + r * ld;
    const int64_t first = max_of(0, r - Tuning::rows + 1) / width * width, diagonal = r / width * width;
    for (int64_t c = first; c < diagonal; c += width) store(x + c, Vec<Real>::zero());
    const auto kept = ge(Vec<Real>::iota(), Vec<Real>::set(Real(r - diagonal)));
    Vec<Real> v = load(x + diagonal);
    if (plus) v = v + load(plus + diagonal);
    store(x + diagonal, select(kept, v, Vec<Real>::zero()));
    if (plus)
      for (int64_t c = diagonal + width; c < cols; c += width) store(x + c, load(x + c) + load(plus + c));
  }
}

}  // namespace
}  // namespace attnjourney
