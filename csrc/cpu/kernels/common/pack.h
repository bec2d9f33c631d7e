// Copies into compute precision: transposed panels (lanes over rows) and plain rows.
#pragma once
#include "common.h"

namespace attnjourney {
namespace {

// Whether all numbers looked at were finite.
template <class C>
class Finite {
 public:
  ATTN_INLINE void see(Vec<C> x) { bad_ = bad_ + (x - x); }
  ATTN_INLINE void see(C x) { bad_one_ += x - x; }
  ATTN_INLINE bool all() const { return finite_bits(bad_) && bad_one_ == C(0); }

 private:
  Vec<C> bad_ = Vec<C>::zero();  // x - x is 0 for a finite x, else NaN
  C bad_one_ = 0;
};

// what packing does to a number on its way
template <class C>
struct Times {
  C factor;
  ATTN_INLINE Vec<C> operator()(Vec<C> x) const { return x * Vec<C>::set(factor); }
  ATTN_INLINE C operator()(C x) const { return x * factor; }
};

// the same, and whether all numbers were finite
template <class C>
struct TimesFinite : Times<C> {
  Finite<C> seen{};
  template <class X>
  ATTN_INLINE X operator()(X x) {
    seen.see(x);
    return Times<C>::operator()(x);
  }
};

struct Unchanged {
  template <class X>
  ATTN_INLINE X operator()(X x) const {
    return x;
  }
};

// X[rows][cols] (row stride ld) through f -> Y[column][lane of row], rows in groups of one vector: row r, column d goes
// to Y[(r / panel) * panel_stride + d * ldy + r % panel]; lanes past the last row are 0. panel is a multiple of W.
// `pack_transposed_by` returns f, which may have seen what it wants to know.
template <class T, class F>
ATTN_NOINLINE F pack_transposed_by(const T* X, int64_t ld, int64_t rows, int64_t cols, F f, Compute<T>* Y,
                                   int64_t panel, int64_t panel_stride, int64_t ldy) {
  using C = Compute<T>;
  constexpr int W = Vec<C>::width;
  for (int64_t r0 = 0; r0 < rows; r0 += W) {
    C* y = Y + r0 / panel * panel_stride + r0 % panel;
    const T* x = X + r0 * ld;
    const int64_t m = min_of(W, rows - r0);
    int64_t d = 0;
    for (; d + W <= cols; d += W) {
      Vec<C> t[W];
      if (m == W)
        ATTN_UNROLL for (int i = 0; i < W; i++) t[i] = f(load(x + i * ld + d));
      else
        for (int i = 0; i < W; i++) t[i] = i < m ? f(load(x + i * ld + d)) : Vec<C>::zero();
      transpose(t);
      ATTN_UNROLL for (int i = 0; i < W; i++) store(y + (d + i) * ldy, t[i]);
    }
    for (; d < cols; d++)
      for (int i = 0; i < W; i++) y[d * ldy + i] = i < m ? f(C(load_one(x + i * ld + d))) : C(0);
  }
  return f;
}
template <class T, class F>
ATTN_INLINE void pack_transposed(const T* X, int64_t ld, int64_t rows, int64_t cols, F f, Compute<T>* Y, int64_t panel,
                                 int64_t panel_stride, int64_t ldy) {
  pack_transposed_by(X, ld, rows, cols, f, Y, panel, panel_stride, ldy);
}

// rows of X in compute precision, columns cols .. padded set to 0; tells whether every number is finite
template <class T>
ATTN_NOINLINE bool pack_rows(const T* X, int64_t ld, int64_t rows, int64_t cols, Compute<T>* Y, int64_t ldy,
                             int64_t padded) {
  using C = Compute<T>;
  constexpr int W = Vec<C>::width;
  constexpr int64_t ahead = 12;  // rows; a strided view defeats the hardware's prefetcher
  Finite<C> finite;
  for (int64_t k = 0; k < rows; k++) {
    const T* x = X + k * ld;
    C* y = Y + k * ldy;
    if (k + ahead < rows)
      for (int64_t i = 0; i < cols; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(x + ahead * ld + i);
    int64_t d = 0;
    for (; d + W <= cols; d += W) {
      const Vec<C> v = load(x + d);
      finite.see(v);
      store(y + d, v);
    }
    for (; d < cols; d++) {
      y[d] = load_one(x + d);
      finite.see(y[d]);
    }
    for (; d < padded; d++) y[d] = C(0);
  }
  return finite.all();
}

template <class C>
ATTN_NOINLINE bool all_finite(const C* X, int64_t ld, int64_t rows, int64_t cols) {
  constexpr int W = Vec<C>::width;
  Finite<C> finite;
  for (int64_t k = 0; k < rows; k++) {
    int64_t d = 0;
    for (; d + W <= cols; d += W) finite.see(load(X + k * ld + d));
    for (; d < cols; d++) finite.see(X[k * ld + d]);
  }
  return finite.all();
}

// rows of X times c into a tensor
template <class T>
ATTN_NOINLINE void unpack_rows(const Compute<T>* X, int64_t ld, int64_t rows, int64_t cols, Compute<T> c, T* Y,
                               int64_t ldy) {
  using C = Compute<T>;
  constexpr int W = Vec<C>::width;
  const Vec<C> vc = Vec<C>::set(c);
  for (int64_t k = 0; k < rows; k++) {
    int64_t d = 0;
    for (; d + W <= cols; d += W) store(Y + k * ldy + d, load(X + k * ld + d) * vc);
    for (; d < cols; d++) store_one(Y + k * ldy + d, X[k * ld + d] * c);
  }
}

}  // namespace
}  // namespace attnjourney
