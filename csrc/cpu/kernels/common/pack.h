// Copies into compute precision: transposed panels (lanes over rows) and plain rows.
#pragma once
#include "common.h"

namespace attnjourney {
namespace {

// Whether all numbers looked at were finite.
template <class Real>
class Finite {
 public:
  ATTN_INLINE void see(Vec<Real> x) { bad_ = bad_ + (x - x); }
  ATTN_INLINE void see(Real x) { bad_one_ += x - x; }
  ATTN_INLINE bool all() const { return finite_bits(bad_) && bad_one_ == Real(0); }

 private:
  Vec<Real> bad_ = Vec<Real>::zero();  // x - x is 0 for a finite x, else NaN
  Real bad_one_ = 0;
};

// what packing does to a number on its way
template <class Real>
struct Times {
  Real factor;
  ATTN_INLINE Vec<Real> operator()(Vec<Real> x) const { return x * Vec<Real>::set(factor); }
  ATTN_INLINE Real operator()(Real x) const { return x * factor; }
};

// the same, and whether all numbers were finite
template <class Real>
struct TimesFinite : Times<Real> {
  Finite<Real> seen{};
  template <class X>
  ATTN_INLINE X operator()(X x) {
    seen.see(x);
    return Times<Real>::operator()(x);
  }
};

struct Unchanged {
  template <class X>
  ATTN_INLINE X operator()(X x) const {
    return x;
  }
};

// from[rows][cols] (row stride ld) through f -> to[column][lane of row], rows in groups of one vector: row r, column d
// at (r / panel) * panel_stride + d * to_ld + r % panel; lanes past the last row are 0. panel is a multiple of width.
// `pack_transposed_by` returns f, which may have seen what it wants to know.
template <class T, class F>
ATTN_NOINLINE F pack_transposed_by(const T* from, int64_t ld, int64_t rows, int64_t cols, F f, Compute<T>* to,
                                   int64_t panel, int64_t panel_stride, int64_t to_ld) {
  using Real = Compute<T>;
  constexpr int width = Vec<Real>::width;
  for (int64_t r0 = 0; r0 < rows; r0 += width) {
    Real* out = to + r0 / panel * panel_stride + r0 % panel;
    const T* row = from + r0 * ld;
    const int64_t count = min_of(width, rows - r0);
    int64_t d = 0;
    for (; d + width <= cols; d += width) {
      Vec<Real> square[width];
      if (count == width)
        ATTN_UNROLL for (int i = 0; i < width; i++) square[i] = f(load(row + i * ld + d));
      else
        for (int i = 0; i < width; i++) square[i] = i < count ? f(load(row + i * ld + d)) : Vec<Real>::zero();
      transpose(square);
      ATTN_UNROLL for (int i = 0; i < width; i++) store(out + (d + i) * to_ld, square[i]);
    }
    for (; d < cols; d++)
      for (int i = 0; i < width; i++) out[d * to_ld + i] = i < count ? f(Real(load_one(row + i * ld + d))) : Real(0);
  }
  return f;
}
template <class T, class F>
ATTN_INLINE void pack_transposed(const T* from, int64_t ld, int64_t rows, int64_t cols, F f, Compute<T>* to,
                                 int64_t panel, int64_t panel_stride, int64_t to_ld) {
  pack_transposed_by(from, ld, rows, cols, f, to, panel, panel_stride, to_ld);
}

// rows in compute precision through f, columns cols .. padded set to 0; tells whether every number is finite
template <class T, class F>
ATTN_NOINLINE bool pack_rows_by(const T* from, int64_t ld, int64_t rows, int64_t cols, F f, Compute<T>* to,
                                int64_t to_ld, int64_t padded) {
  using Real = Compute<T>;
  constexpr int width = Vec<Real>::width;
  constexpr int64_t distance = 12;  // rows; a strided view defeats the hardware's prefetcher
  Finite<Real> finite;
  for (int64_t k = 0; k < rows; k++) {
    const T* row = from + k * ld;
    Real* out = to + k * to_ld;
    if (k + distance < rows)
      for (int64_t i = 0; i < cols; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + distance * ld + i);
    int64_t d = 0;
    for (; d + width <= cols; d += width) {
      const Vec<Real> numbers = f(load(row + d));
      finite.see(numbers);
      store(out + d, numbers);
    }
    for (; d < cols; d++) {
      out[d] = f(Real(load_one(row + d)));
      finite.see(out[d]);
    }
    for (; d < padded; d++) out[d] = Real(0);
  }
  return finite.all();
}
template <class T>
ATTN_INLINE bool pack_rows(const T* from, int64_t ld, int64_t rows, int64_t cols, Compute<T>* to, int64_t to_ld,
                           int64_t padded) {
  return pack_rows_by(from, ld, rows, cols, Unchanged{}, to, to_ld, padded);
}

template <class T>
ATTN_NOINLINE bool all_finite(const T* from, int64_t ld, int64_t rows, int64_t cols) {
  constexpr int width = Vec<Compute<T>>::width;
  Finite<Compute<T>> finite;
  for (int64_t k = 0; k < rows; k++) {
    int64_t d = 0;
    for (; d + width <= cols; d += width) finite.see(load(from + k * ld + d));
    for (; d < cols; d++) finite.see(load_one(from + k * ld + d));
  }
  return finite.all();
}

// rows times a factor into a tensor
template <class T>
ATTN_NOINLINE void unpack_rows(const Compute<T>* from, int64_t ld, int64_t rows, int64_t cols, Compute<T> factor, T* to,
                               int64_t to_ld) {
  using Real = Compute<T>;
  constexpr int width = Vec<Real>::width;
  const Vec<Real> factors = Vec<Real>::set(factor);
  for (int64_t k = 0; k < rows; k++) {
    int64_t d = 0;
    for (; d + width <= cols; d += width) store(to + k * to_ld + d, load(from + k * ld + d) * factors);
    for (; d < cols; d++) store_one(to + k * to_ld + d, from[k * ld + d] * factor);
  }
}

}  // namespace
}  // namespace attnjourney
