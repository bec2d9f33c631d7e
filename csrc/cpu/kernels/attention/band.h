// Products of a chunk of a causal sequence with itself: one side of the diagonal is neither computed nor read.
#pragma once
#include "cpu/kernels/common/mask_prefetch.h"
#include "cpu/kernels/common/tile.h"

namespace attnjourney {
namespace {

// what row r of a product out[r][c] = sum_x A(r, x) B[x][c] takes
enum class Band {
  full,
  upper,     // all x, but only columns c >= r of out are wanted
  to_row,    // x <= r: A(r, x) is 0 where x > r
  from_row,  // x >= r: A(r, x) is 0 where x < r
};

// calls f(first, Rows<n>) for pieces of `count` vectors, Max at a time, without a single one left over
template <int Max, class F>
ATTN_INLINE void split_vectors(int64_t count, F&& f) {
  for (int64_t v = 0; v < count;) {
    const int64_t left = count - v, n = left > Max && left < 2 * Max ? (left + 1) / 2 : min_of(left, Max);
    with_rows<Max>(n, [&](auto n_) { f(v, n_); });
    v += n;
  }
}

// out[r][c] (+)= sum over x < n. A(r, x) is A[r * lda + x], or A[x * lda + r] where `columns`. cols is a multiple of
// the vector width. What is added goes to `also` too, where there is one.
template <bool columns, class C>
ATTN_NOINLINE void multiply(const C* A, int64_t lda, const C* B, int64_t ldb, int64_t n, int64_t rows, int64_t cols,
                            Band band, bool add, C* out, int64_t ldo, C* also = nullptr, Ahead* ahead = nullptr) {
  split_rows<Tuning::linear_rows>(rows, [&](int64_t r, auto n_rows) {
    constexpr int M = decltype(n_rows)::count;
    const int64_t begin = band == Band::from_row ? r : 0;
    const int64_t count = (band == Band::to_row ? min_of(n, r + M) : n) - begin;
    const int64_t left = band == Band::upper ? r / Vec<C>::width * Vec<C>::width : 0;
    if (ahead) ahead->step();
    split_vectors<Tuning::linear_vectors>((cols - left) / Vec<C>::width, [&](int64_t v, auto n_vectors) {
      constexpr int N = decltype(n_vectors)::count;
      const int64_t c = left + v * Vec<C>::width;
      Tile<C, M, N> t;
      t.clear();
      if constexpr (columns)
        t.add_columns(A + begin * lda + r, lda, B + begin * ldb + c, ldb, count);
      else
        t.add_rows(A + r * lda + begin, lda, B + begin * ldb + c, ldb, count);
      if (also) [[unlikely]] {
        Tile<C, M, N> u = t;
        u.add(also + r * ldo + c, ldo);
        u.store_to(also + r * ldo + c, ldo);
      }
      if (add) t.add(out + r * ldo + c, ldo);
      t.store_to(out + r * ldo + c, ldo);
    });
  });
}

// The same sums over to_row or from_row, added, where B holds an inf or a NaN: what is hidden is not read.
template <bool columns, class C>
ATTN_NOINLINE void multiply_guarded(const C* A, int64_t lda, const C* B, int64_t ldb, int64_t n, int64_t rows,
                                    int64_t cols, Band band, C* out, int64_t ldo) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t x = band == Band::from_row ? r : 0; x < (band == Band::to_row ? min_of(n, r + 1) : n); x++) {
      const C w = columns ? A[x * lda + r] : A[r * lda + x];
      for (int64_t c = 0; c < cols; c++) out[r * ldo + c] = fma(w, B[x * ldb + c], out[r * ldo + c]);
    }
}

// added by whichever of the two is right
template <bool columns, class C>
ATTN_INLINE void multiply_band(const C* A, int64_t lda, const C* B, int64_t ldb, int64_t n, int64_t rows, int64_t cols,
                               Band band, bool finite, C* out, int64_t ldo, Ahead* ahead = nullptr) {
  if (finite)
    multiply<columns>(A, lda, B, ldb, n, rows, cols, band, true, out, ldo, static_cast<C*>(nullptr), ahead);
  else
    multiply_guarded<columns>(A, lda, B, ldb, n, rows, cols, band, out, ldo);
}

// X[r][c] of an `upper` product: `plus`[c] added (where given), then 0 where c < r as far as a band product reads
template <class C>
ATTN_NOINLINE void clear_below_diagonal(C* X, int64_t ld, int64_t rows, int64_t cols, const C* plus) {
  constexpr int W = Vec<C>::width;
  for (int64_t r = 0; r < rows; r++) {
    C* x = X + r * ld;
    const int64_t first = max_of(0, r - Tuning::rows + 1) / W * W, diagonal = r / W * W;
    for (int64_t c = first; c < diagonal; c += W) store(x + c, Vec<C>::zero());
    const auto kept = ge(Vec<C>::iota(), Vec<C>::set(C(r - diagonal)));
    Vec<C> v = load(x + diagonal);
    if (plus) v = v + load(plus + diagonal);
    store(x + diagonal, select(kept, v, Vec<C>::zero()));
    if (plus)
      for (int64_t c = diagonal + W; c < cols; c += W) store(x + c, load(x + c) + load(plus + c));
  }
}

}  // namespace
}  // namespace attnjourney
