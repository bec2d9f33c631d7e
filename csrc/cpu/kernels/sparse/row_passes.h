// Rows of query, a few at a time in registers, against rows of a matrix: products [pass][key][row of the pass].
#pragma once
#include "cpu/kernels/common/pack.h"
#include "cpu/kernels/common/scratch.h"
#include "cpu/kernels/common/tile.h"
#include "cpu/kernels/shared.h"

namespace attnjourney {
namespace {

constexpr int64_t keys_of_block = 64;  // that all passes take before the next ones: what the second-level cache holds

struct Passes {
  int64_t rows, count;  // of a pass, a power of two up to 8; passes
  ATTN_INLINE explicit Passes(int64_t all) {
    rows = rows_of_pass(max_of(1, all));
    count = (all + rows - 1) / rows;
  }
  int64_t all() const { return rows * count; }
  // calls f(Rows<rows>)
  template <class F>
  ATTN_INLINE void with(F&& f) const {
    with_pass(rows, static_cast<F&&>(f));
  }
};

template <class T>
struct PassProducts {
  using Real = Compute<T>;
  using Products = RowProducts<T>;
  static constexpr int width = Vec<Real>::width;
  // numbers behind n of a pass that vectors reach
  static int64_t padded(const Passes& p, int64_t n) { return round_up(n * p.rows + 2 * width, 64 / sizeof(Real)); }

  // to[pass * stride + k * rows + r] = rows of `left` (padded, left_ld) times the n rows of `right`
  static void dots(const Passes& p, const Real* left, int64_t left_ld, const T* right, int64_t right_row, int64_t dim,
                   int64_t n, Real* to, int64_t stride) {
    LinePrefetch none(nullptr, 0, 0, 0);
    for (int64_t k = 0; k < n; k += keys_of_block)
      for (int64_t i = 0; i < p.count; i++)
        p.with([&](auto r) {
          row_scores<T, r.count>(left + i * p.rows * left_ld, left_ld, right + k * right_row, right_row, dim,
                                 min_of(keys_of_block, n - k), to + i * stride + k * p.rows, none);
        });
  }
  // sums[pass * rows + r][padded dim] += weights times rows of `right`; guarded: a weight of 0 hides what is not finite
  static void sums(const Passes& p, const Real* weights, int64_t stride, const T* right, int64_t right_row, int64_t dim,
                   int64_t n, bool guarded, Real* to, int64_t to_ld) {
    LinePrefetch none(nullptr, 0, 0, 0);
    for (int64_t k = 0; k < n; k += keys_of_block)
      for (int64_t i = 0; i < p.count; i++) {
        const Real* const own = weights + i * stride + k * p.rows;
        const int64_t count = min_of(keys_of_block, n - k);
        Real* const out = to + i * p.rows * to_ld;
        if (guarded)
          Products::weighted_values_guarded(own, p.rows, count, right + k * right_row, right_row, dim, out, to_ld);
        else
          p.with([&](auto r) {
            row_sums<T, r.count>(own, count, right + k * right_row, right_row, dim, out, to_ld, none);
          });
      }
  }
};

// Rows of sums, one for each key, to which rows of several heads are added:
// to[keys[j]] += sum over pass and r of weights[pass * stride + j * rows + r] * right[pass * rows + r]
template <class Real>
struct KeySums {
  static constexpr int width = Vec<Real>::width;
  static constexpr int M = Tuning::rows, N = Tuning::vectors;

  template <int m, int n>
  static ATTN_INLINE void tile(const Passes& p, const Real* weights, int64_t stride, const Real* right, int64_t ld,
                               const int32_t* keys, Real* to) {
    Tile<Real, m, n> t;
    t.clear();
    for (int64_t i = 0; i < p.count; i++)
      p.with([&](auto r) { t.add_rows(weights + i * stride, r.count, right + i * r.count * ld, ld, r.count); });
    for (int k = 0; k < m; k++) {  // one after the other: two may be the same key
      Real* const out = to + keys[k] * ld;
      ATTN_UNROLL for (int j = 0; j < n; j++) store(out + j * width, load(out + j * width) + t.acc[k][j]);
    }
  }

  // cols, a multiple of width: of `to` and of `right`, whose rows are ld apart
  static ATTN_NOINLINE void add(const Passes& p, const Real* weights, int64_t stride, const Real* right, int64_t ld,
                                int64_t cols, const int32_t* keys, int64_t begin, int64_t end, Real* to) {
    for (int64_t first = begin; first < end; first += keys_of_block) {
      const int64_t count = min_of(keys_of_block, end - first);
      split_columns<Real, N>(cols, [&](int64_t d, auto n) {
        int64_t k = first;
        for (; k + M <= first + count; k += M)
          tile<M, n.count>(p, weights + k * p.rows, stride, right + d, ld, keys + k, to + d);
        for (; k < first + count; k++)
          tile<1, n.count>(p, weights + k * p.rows, stride, right + d, ld, keys + k, to + d);
      });
    }
  }
  // the same where a weight of 0 hides what is not finite
  static ATTN_NOINLINE void add_guarded_rows(const Passes& p, const Real* weights, int64_t stride, const Real* right,
                                             int64_t ld, int64_t cols, const int32_t* keys, int64_t begin, int64_t end,
                                             Real* to) {
    for (int64_t k = begin; k < end; k++)
      for (int64_t i = 0; i < p.count; i++)
        for (int64_t r = 0; r < p.rows; r++) {
          const Real weight = weights[i * stride + k * p.rows + r];
          if (weight == Real(0)) continue;
          const Vec<Real> factor = Vec<Real>::set(weight);
          const Real* const row = right + (i * p.rows + r) * ld;
          for (int64_t d = 0; d < cols; d += width)
            store(to + keys[k] * ld + d, fma(factor, load(row + d), load(to + keys[k] * ld + d)));
        }
  }
};

}  // namespace
}  // namespace attnjourney
