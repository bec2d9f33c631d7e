// Feature maps of linear attention, and rows packed through them.
#pragma once
#include "cpu/kernels/common/exp2.h"
#include "cpu/kernels/common/pack.h"
#include "linear/params.h"

namespace attnjourney {
namespace {

// e^x for x <= 0, relative error 7e-8 (double: 2e-16); below the exponent range about the smallest normal number. A NaN
// stays.
ATTN_INLINE Vf exp_negative(Vf x) {
  x = max(Vf::set(-86.f), x);
  const Vf n = round(x * Vf::set(float(log2_e)));  // ln 2 in two parts, so that x - n ln 2 is exact
  const Vf r = fma(n, Vf::set(2.12194440e-4f), fma(n, Vf::set(-0.693359375f), x));
  Vf p = Vf::set(1.9875691500e-4f);  // e^r = 1 + (r + r^2 p(r)): the last addition alone rounds at the result's size
  p = fma(p, r, Vf::set(1.3981999507e-3f));
  p = fma(p, r, Vf::set(8.3334519073e-3f));
  p = fma(p, r, Vf::set(4.1665795894e-2f));
  p = fma(p, r, Vf::set(1.6666665459e-1f));
  p = fma(p, r, Vf::set(5.0000001201e-1f));
  return scale_by_power(Vf::set(1.f) + fma(r * r, p, r), n);
}
ATTN_INLINE Vd exp_negative(Vd x) {
  x = max(Vd::set(-707.0), x);
  const Vd n = round(x * Vd::set(log2_e));
  const Vd r = fma(n, Vd::set(-1.90821492927058770002e-10), fma(n, Vd::set(-6.93147180369123816490e-01), x));
  return scale_by_power(exp2_fraction(r * Vd::set(log2_e)), n);
}

template <FeatureMap F>
struct FeatureMapOf {
  static constexpr FeatureMap map = F;
};

// calls f(FeatureMapOf<map>)
template <class F>
ATTN_INLINE void with_feature_map(FeatureMap map, F&& f) {
  if (map == FeatureMap::identity)
    f(FeatureMapOf<FeatureMap::identity>{});
  else if (map == FeatureMap::relu)
    f(FeatureMapOf<FeatureMap::relu>{});
  else
    f(FeatureMapOf<FeatureMap::elu_plus_one>{});
}

// factor * phi(x)
template <FeatureMap F, class Real>
struct Feature {
  Real factor;
  ATTN_INLINE Vec<Real> operator()(Vec<Real> x) const {
    const Vec<Real> zero = Vec<Real>::zero();
    if constexpr (F == FeatureMap::relu) x = max(zero, x);  // in this order a NaN stays
    if constexpr (F == FeatureMap::elu_plus_one)
      x = select(ge(x, zero), x + Vec<Real>::set(Real(1)), exp_negative(min(zero, x)));
    return x * Vec<Real>::set(factor);
  }
  ATTN_INLINE Real operator()(Real x) const { return one_of(*this, x); }
};

// factor * phi'(x); at 0 that of the left, as torch has it
template <FeatureMap F, class Real>
struct FeatureSlope {
  Real factor;
  ATTN_INLINE Vec<Real> operator()(Vec<Real> x) const {
    const Vec<Real> zero = Vec<Real>::zero(), one = Vec<Real>::set(Real(1));
    Vec<Real> y = one;
    if constexpr (F == FeatureMap::relu) y = select(ge(zero, x), zero, one);
    if constexpr (F == FeatureMap::elu_plus_one) y = select(ge(x, zero), one, exp_negative(min(zero, x)));
    return y * Vec<Real>::set(factor);
  }
  ATTN_INLINE Real operator()(Real x) const { return one_of(*this, x); }
};

// phi' from phi itself, without another exponential: the bits of FeatureSlope with factor 1
template <FeatureMap F, class Real>
struct SlopeOfFeature {
  ATTN_INLINE Vec<Real> operator()(Vec<Real> phi) const {
    const Vec<Real> zero = Vec<Real>::zero(), one = Vec<Real>::set(Real(1));
    if constexpr (F == FeatureMap::relu) return select(ge(zero, phi), zero, one);
    if constexpr (F == FeatureMap::elu_plus_one) return select(ge(phi, one), one, phi);
    return one;
  }
  ATTN_INLINE Real operator()(Real x) const { return one_of(*this, x); }
};

// a function of vectors for a single number, with the same bits
template <class F, class Real>
ATTN_INLINE Real one_of(const F& f, Real x) {
  alignas(64) Real y[Vec<Real>::width];
  store(y, f(Vec<Real>::set(x)));
  return y[0];
}

// Rows through f, columns cols .. padded set to 0, blocked rows all 0 and not read; tells whether every result is
// finite.
template <class T, class F>
ATTN_NOINLINE bool map_rows(const T* from, int64_t ld, int64_t rows, int64_t cols, F f, const uint8_t* blocked,
                            Compute<T>* to, int64_t to_ld, int64_t padded) {
  using Real = Compute<T>;
  constexpr int width = Vec<Real>::width;
  Finite<Real> finite;
  for (int64_t k = 0; k < rows; k++) {
    const T* row = from + k * ld;
    Real* out = to + k * to_ld;
    if (blocked && blocked[k]) {
      memset(out, 0, size_t(padded) * sizeof(Real));
      continue;
    }
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

// to = grad * slope(from) row by row, 0 in blocked rows: a gradient carried back through a feature map. to: a tensor
template <class From, class T, class F>
ATTN_NOINLINE void scale_by_slope(const Compute<T>* grad, int64_t grad_ld, const From* from, int64_t from_ld,
                                  int64_t rows, int64_t cols, F slope, const uint8_t* blocked, T* to) {
  using Real = Compute<T>;
  constexpr int width = Vec<Real>::width;
  for (int64_t k = 0; k < rows; k++) {
    const Real* grad_row = grad + k * grad_ld;
    const From* row = from + k * from_ld;
    T* out = to + k * cols;
    if (blocked && blocked[k]) {
      memset(static_cast<void*>(out), 0, size_t(cols) * sizeof(T));
      continue;
    }
    int64_t d = 0;
    for (; d + width <= cols; d += width) store(out + d, load(grad_row + d) * slope(load(row + d)));
    for (; d < cols; d++) store_one(out + d, grad_row[d] * slope(Real(load_one(row + d))));
  }
}

}  // namespace
}  // namespace attnjourney
