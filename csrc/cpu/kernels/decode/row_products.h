// The two products of a few rows with many: dot products with lanes over the dimension, and weighted sums with lanes
// over the columns. The many rows are read once, in their dtype.
#pragma once
#include "cpu/kernels/common/tile.h"
#include "line_prefetch.h"

namespace attnjourney {
namespace {

// A vector of a row whose length need not be a multiple of width: the lanes past `n` are 0 and not read.
template <class T>
ATTN_NOINLINE Vec<Compute<T>> load_part(const T* from, int64_t n) {
  Compute<T> numbers[Vec<Compute<T>>::width] = {};
  for (int64_t i = 0; i < n; i++) numbers[i] = load_one(from + i);
  return load(numbers);
}

// Few rows go in passes: the rows of one, a power of two up to 8, of so many; and f(Rows<rows>) for them.
ATTN_INLINE int64_t rows_of_pass(int64_t count) { return count >= 5 ? 8 : count >= 3 ? 4 : count; }
template <class F>
ATTN_INLINE void with_pass(int64_t rows, F&& f) {
  switch (rows) {
    case 1:
      return f(Rows<1>{});
    case 2:
      return f(Rows<2>{});
    case 4:
      return f(Rows<4>{});
    default:
      return f(Rows<8>{});
  }
}

// How numbers of T are read where any_nan has found none among them.
template <class T>
struct WithoutNan {
  static constexpr bool differs = false;
  using type = T;
};
template <>
struct WithoutNan<e4m3> {
  static constexpr bool differs = true;
  using type = finite_e4m3;
};

template <class T>
struct RowProducts {
  using Real = Compute<T>;
  using V = Vec<Real>;
  static constexpr int width = V::width;
  static constexpr int max_rows = 8;                          // rows that one pass over registers serves
  static constexpr int sums_at_once = width > 8 ? width : 8;  // dot products, one accumulator each
  static constexpr int pv_rows = Tuning::rows >= 8 ? 8 : 4;   // rows of P V in registers together
  static constexpr int pv_tile = Tuning::rows >= 8 ? 16 : 8;  // accumulators of P V
  // whose values are summed before they join the output: those that are looked at for a NaN together
  static ATTN_INLINE int64_t keys_together(int64_t n) { return WithoutNan<T>::differs ? 32 : max_of(1, n); }

  static ATTN_INLINE int64_t padded(int64_t n) { return round_up(n, width); }

  // scores[k][R]: dot products of R rows (q: row stride query_ld) with K keys, R * K = sums_at_once
  template <int R>
  static ATTN_INLINE void dot_tile(const Real* query, int64_t query_ld, const T* key, int64_t k_row, int64_t dim,
                                   Real* scores, LinePrefetch& prefetch) {
    constexpr int K = sums_at_once / R;
    V acc[sums_at_once];
    ATTN_UNROLL for (int i = 0; i < sums_at_once; i++) acc[i] = V::zero();
    const int64_t whole = dim / width * width;
    constexpr bool many_keys = R == 1;  // whose lines would come in a burst
    if constexpr (!many_keys) prefetch.step(K * (dim / width));
    _Pragma("GCC unroll 2") for (int64_t d = 0; d < whole; d += width) {
      if constexpr (many_keys) prefetch.step(K);
      if constexpr (R <= K) {
        V of_query[R];
        ATTN_UNROLL for (int r = 0; r < R; r++) of_query[r] = load(query + r * query_ld + d);
        ATTN_UNROLL for (int k = 0; k < K; k++) {
          const V numbers = load(key + k * k_row + d);
          ATTN_UNROLL for (int r = 0; r < R; r++) acc[k * R + r] = fma(of_query[r], numbers, acc[k * R + r]);
        }
      } else {
        V of_key[K];
        ATTN_UNROLL for (int k = 0; k < K; k++) of_key[k] = load(key + k * k_row + d);
        ATTN_UNROLL for (int r = 0; r < R; r++) {
          const V of_query = load(query + r * query_ld + d);
          ATTN_UNROLL for (int k = 0; k < K; k++) acc[k * R + r] = fma(of_query, of_key[k], acc[k * R + r]);
        }
      }
    }
    if (whole < dim) ATTN_UNROLL for (int k = 0; k < K; k++) {
        const V numbers = load_part(key + k * k_row + whole, dim - whole);
        ATTN_UNROLL for (int r = 0; r < R; r++) acc[k * R + r] =
            fma(load(query + r * query_ld + whole), numbers, acc[k * R + r]);
      }
    ATTN_UNROLL for (int i = 0; i < sums_at_once; i += width) {
      V group[width];
      ATTN_UNROLL for (int j = 0; j < width; j++) group[j] = acc[i + j];
      store(scores + i, sums(group));
    }
  }

  // scores[R]: of one key
  template <int R>
  static ATTN_NOINLINE void dot_key(const Real* query, int64_t query_ld, const T* key, int64_t dim, Real* scores) {
    const int64_t whole = dim / width * width;
    V acc[R];
    ATTN_UNROLL for (int r = 0; r < R; r++) acc[r] = V::zero();
    for (int64_t d = 0; d < whole; d += width)
      ATTN_UNROLL for (int r = 0; r < R; r++) acc[r] = fma(load(query + r * query_ld + d), load(key + d), acc[r]);
    if (whole < dim) {
      const V tail = load_part(key + whole, dim - whole);
      ATTN_UNROLL for (int r = 0; r < R; r++) acc[r] = fma(load(query + r * query_ld + whole), tail, acc[r]);
    }
    ATTN_UNROLL for (int r = 0; r < R; r++) scores[r] = sum(acc[r]);
  }

  template <int R>
  static ATTN_NOINLINE void scores(const Real* query, int64_t query_ld, const T* key, int64_t k_row, int64_t dim,
                                   int64_t n, Real* scores, LinePrefetch& prefetch) {
    constexpr int K = sums_at_once / R;
    const auto one_by_one = [&](int64_t k, int64_t end) {
      for (; k < end; k++) {
        dot_key<R>(query, query_ld, key + k * k_row, dim, scores + k * R);
        prefetch.step(dim / width);
      }
    };
    int64_t k = 0;
    for (; k + K <= n; k += K) {
      const T* const rows = key + k * k_row;
      if constexpr (WithoutNan<T>::differs) {
        using Finite = typename WithoutNan<T>::type;
        if (any_nan(rows, k_row, K, dim))
          one_by_one(k, k + K);
        else
          RowProducts<Finite>::template dot_tile<R>(query, query_ld, reinterpret_cast<const Finite*>(rows), k_row, dim,
                                                    scores + k * R, prefetch);
      } else {
        dot_tile<R>(query, query_ld, rows, k_row, dim, scores + k * R, prefetch);
      }
    }
    one_by_one(k, n);
  }

  // output[r][N vectors] += sum over n keys of weights[k * weights_ld + r] value[k]
  template <int R, int N>
  static ATTN_INLINE void pv_block(const Real* weights, int64_t weights_ld, int64_t n, const T* value, int64_t v_row,
                                   Real* output, int64_t output_ld, LinePrefetch& prefetch) {
    V acc[R][N];
    ATTN_UNROLL for (int r = 0; r < R; r++) ATTN_UNROLL for (int j = 0; j < N; j++) acc[r][j] = V::zero();
    constexpr int together = R * N >= pv_tile ? 8 : 1;  // keys that one step is for
    _Pragma("GCC unroll 2") for (int64_t k = 0; k < n; k++, weights += weights_ld, value += v_row) {
      if (k % together == 0) prefetch.step(N * together);
      V values[N];
      ATTN_UNROLL for (int j = 0; j < N; j++) values[j] = load(value + width * j);
      ATTN_UNROLL for (int r = 0; r < R; r++) {
        const V weight = V::broadcast(weights + r);
        ATTN_UNROLL for (int j = 0; j < N; j++) acc[r][j] = fma(weight, values[j], acc[r][j]);
      }
    }
    // added after the products: sums that start from the total would round every product at its size
    ATTN_UNROLL for (int r = 0; r < R; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
        store(output + r * output_ld + width * j, load(output + r * output_ld + width * j) + acc[r][j]);
  }
  template <int R>
  static ATTN_INLINE void pv_tail(const Real* weights, int64_t weights_ld, int64_t n, const T* value, int64_t v_row,
                                  int64_t left, Real* output, int64_t output_ld) {
    V acc[R];
    ATTN_UNROLL for (int r = 0; r < R; r++) acc[r] = V::zero();
    for (int64_t k = 0; k < n; k++) {
      const V numbers = load_part(value + k * v_row, left);
      ATTN_UNROLL for (int r = 0; r < R; r++) acc[r] = fma(V::broadcast(weights + k * weights_ld + r), numbers, acc[r]);
    }
    ATTN_UNROLL for (int r = 0; r < R; r++) store(output + r * output_ld, load(output + r * output_ld) + acc[r]);
  }
  template <int R, int N>
  static ATTN_INLINE void pv_columns(int64_t& d, int64_t whole, const Real* weights, int64_t weights_ld, int64_t n,
                                     const T* value, int64_t v_row, Real* output, int64_t output_ld,
                                     LinePrefetch& prefetch) {
    for (; d + N * width <= whole; d += N * width)
      pv_block<R, N>(weights, weights_ld, n, value + d, v_row, output + d, output_ld, prefetch);
    if constexpr (N > 1)
      pv_columns<R, N / 2>(d, whole, weights, weights_ld, n, value, v_row, output, output_ld, prefetch);
  }
  // output[r] += sum over n keys of weights[k * R + r] value[k]
  template <int R>
  static ATTN_INLINE void pv_keys(const Real* weights, int64_t n, const T* value, int64_t v_row, int64_t dim,
                                  Real* output, int64_t output_ld, LinePrefetch& prefetch) {
    constexpr int M = R < pv_rows ? R : pv_rows, N = pv_tile / M < 8 ? pv_tile / M : 8;
    for (int r = 0; r < R; r += M) {
      int64_t d = 0;
      const int64_t whole = dim / width * width;
      pv_columns<M, N>(d, whole, weights + r, R, n, value, v_row, output + r * output_ld, output_ld, prefetch);
      if (d < dim) pv_tail<M>(weights + r, R, n, value + d, v_row, dim - d, output + r * output_ld + d, output_ld);
    }
  }
  template <int R>
  static ATTN_NOINLINE void weighted_values(const Real* weights, int64_t n, const T* value, int64_t v_row, int64_t dim,
                                            Real* output, int64_t output_ld, LinePrefetch& prefetch) {
    if constexpr (WithoutNan<T>::differs) {
      using Finite = typename WithoutNan<T>::type;
      for (int64_t k = 0; k < n; k += keys_together(n), weights += keys_together(n) * R) {
        const int64_t count = min_of(keys_together(n), n - k);
        const T* const rows = value + k * v_row;
        if (any_nan(rows, v_row, count, dim))
          pv_keys<R>(weights, count, rows, v_row, dim, output, output_ld, prefetch);
        else
          RowProducts<Finite>::template pv_keys<R>(weights, count, reinterpret_cast<const Finite*>(rows), v_row, dim,
                                                   output, output_ld, prefetch);
      }
    } else {
      pv_keys<R>(weights, n, value, v_row, dim, output, output_ld, prefetch);
    }
  }
  // The same, with the same bits, where a row may not see a value that is an inf or a NaN: a weight of exactly 0 hides
  // it.
  static ATTN_NOINLINE void weighted_values_guarded(const Real* weights, int64_t rows, int64_t n, const T* value,
                                                    int64_t v_row, int64_t dim, Real* output, int64_t output_ld) {
    const int64_t most = keys_together(n);
    for (int64_t first = 0; first < n; first += most)
      for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < dim; d++) {
          Real sum = 0;
          for (int64_t k = first; k < min_of(first + most, n); k++) {
            const Real weight = weights[k * rows + r];
            if (weight != Real(0)) sum = fma(weight, load_one(value + k * v_row + d), sum);
          }
          output[r * output_ld + d] += sum;
        }
  }
};

}  // namespace
}  // namespace attnjourney
