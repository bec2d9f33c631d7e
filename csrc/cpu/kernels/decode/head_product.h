// A few rows times one head's weights, which are read once, in their dtype: what absorbs W_UK into queries and takes
// results through W_UV in mla_decode. The two products of decode.h: x W is a weighted sum of W's rows, x W^T the dot
// products with them.
#pragma once
#include "decode/params.h"
#include "row_products.h"

namespace attnjourney {
namespace {

template <class T>
struct HeadProduct {
  using D = RowProducts<T>;
  using C = Compute<T>;

  static ATTN_INLINE int64_t row_block(const HeadProductParams& p) {  // rows of W in 16 KB
    return max_of(8, 16384 / int64_t(sizeof(T)) / max_of(1, p.transposed ? p.inner : p.width));
  }
  // numbers of C
  static int64_t space(const HeadProductParams& p) {
    const int64_t rows = round_up(p.rows, D::max_rows);
    return rows * (D::padded(p.inner) + D::padded(p.width)) + row_block(p) * D::max_rows + 2 * D::sums_at_once;
  }

  static ATTN_INLINE const T* x_row(const HeadProductParams& p, int64_t i) {
    return static_cast<const T*>(p.x) + i / p.q_len * p.x_batch + i % p.q_len * p.x_row;
  }
  static ATTN_INLINE T* out_row(const HeadProductParams& p, int64_t i) {
    return static_cast<T*>(p.out) + i / p.q_len * p.out_batch + i % p.q_len * p.out_row;
  }

  static LinesAhead lines_ahead(const HeadProductParams& p, int64_t groups) {
    const int64_t rows = p.transposed ? p.width : p.inner, width = p.transposed ? p.inner : p.width;
    constexpr int64_t size = sizeof(T);
    LinesAhead ahead(p.w, rows, width * size, p.w_row * size);
    ahead.start(width * size, groups * max_of(1, width / D::W), groups > 1 ? row_block(p) * width * size : 4096);
    return ahead;
  }

  // W (inner, width)
  template <int R>
  static void plain(const HeadProductParams& p, C* space) {
    const int64_t groups = (p.rows + R - 1) / R, ldo = D::padded(p.width), block = row_block(p);
    C *const P = space, *const O = P + groups * R * D::padded(p.inner);  // P [group][inner][R]
    for (int64_t i = 0; i < groups * R; i++) {
      C* y = P + i / R * p.inner * R + i % R;
      for (int64_t k = 0; k < p.inner; k++) y[k * R] = i < p.rows ? load_one(x_row(p, i) + k) : C(0);
    }
    memset(O, 0, sizeof(C) * size_t(groups * R * ldo));
    LinesAhead ahead = lines_ahead(p, groups);
    for (int64_t k = 0; k < p.inner; k += block) {
      const int64_t n = min_of(block, p.inner - k);
      const T* w = static_cast<const T*>(p.w) + k * p.w_row;
      for (int64_t g = 0; g < groups; g++)
        D::template weighted_values<R>(P + (g * p.inner + k) * R, n, w, p.w_row, p.width, O + g * R * ldo, ldo, ahead);
    }
    for (int64_t i = 0; i < p.rows; i++)
      for (int64_t d = 0; d < p.width; d++) store_one(out_row(p, i) + d, O[i * ldo + d]);
  }

  // W (width, inner)
  template <int R>
  static void transposed(const HeadProductParams& p, C* space) {
    const int64_t groups = (p.rows + R - 1) / R, ldx = D::padded(p.inner), block = row_block(p);
    C *const X = space, *const S = X + groups * R * ldx;
    memset(X, 0, sizeof(C) * size_t(groups * R * ldx));
    LinesAhead ahead = lines_ahead(p, groups);
    for (int64_t i = 0; i < p.rows; i++)
      for (int64_t d = 0; d < p.inner; d++) X[i * ldx + d] = load_one(x_row(p, i) + d);
    for (int64_t k = 0; k < p.width; k += block) {
      const int64_t n = min_of(block, p.width - k);
      const T* w = static_cast<const T*>(p.w) + k * p.w_row;
      for (int64_t g = 0; g < groups; g++) {
        D::template scores<R>(X + g * R * ldx, ldx, w, p.w_row, p.inner, n, S, ahead);
        for (int64_t r = 0; r < min_of(R, p.rows - g * R); r++)
          for (int64_t j = 0; j < n; j++) store_one(out_row(p, g * R + r) + k + j, S[j * R + r]);
      }
    }
  }

  template <int R>
  static void run_rows(const HeadProductParams& p, C* space) {
    p.transposed ? transposed<R>(p, space) : plain<R>(p, space);
  }
  static void run(const HeadProductParams& p, void* space) {
    C* const s = static_cast<C*>(space);
    p.rows >= 5   ? run_rows<8>(p, s)
    : p.rows >= 3 ? run_rows<4>(p, s)
    : p.rows == 2 ? run_rows<2>(p, s)
                  : run_rows<1>(p, s);
  }
};

}  // namespace
}  // namespace attnjourney
