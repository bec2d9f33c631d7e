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
template <FeatureMap F, class C>
struct Feature {
  C factor;
  ATTN_INLINE Vec<C> operator()(Vec<C> x) const {
    const Vec<C> zero = Vec<C>::zero();
    if constexpr (F == FeatureMap::relu) x = max(zero, x);  // in this order a NaN stays
    if constexpr (F == FeatureMap::elu_plus_one)
      x = select(ge(x, zero), x + Vec<C>::set(C(1)), exp_negative(min(zero, x)));
    return x * Vec<C>::set(factor);
  }
  ATTN_INLINE C operator()(C x) const { return one_of(*this, x); }
};

// factor * phi'(x); at 0 that of the left, as torch has it
template <FeatureMap F, class C>
struct FeatureSlope {
  C factor;
  ATTN_INLINE Vec<C> operator()(Vec<C> x) const {
    const Vec<C> zero = Vec<C>::zero(), one = Vec<C>::set(C(1));
    Vec<C> y = one;
    if constexpr (F == FeatureMap::relu) y = select(ge(zero, x), zero, one);
    if constexpr (F == FeatureMap::elu_plus_one) y = select(ge(x, zero), one, exp_negative(min(zero, x)));
    return y * Vec<C>::set(factor);
  }
  ATTN_INLINE C operator()(C x) const { return one_of(*this, x); }
};

// phi' from phi itself, without another exponential: the bits of FeatureSlope with factor 1
template <FeatureMap F, class C>
struct SlopeOfFeature {
  ATTN_INLINE Vec<C> operator()(Vec<C> phi) const {
    const Vec<C> zero = Vec<C>::zero(), one = Vec<C>::set(C(1));
    if constexpr (F == FeatureMap::relu) return select(ge(zero, phi), zero, one);
    if constexpr (F == FeatureMap::elu_plus_one) return select(ge(phi, one), one, phi);
    return one;
  }
  ATTN_INLINE C operator()(C x) const { return one_of(*this, x); }
};

// a function of vectors for a single number, with the same bits
template <class F, class C>
ATTN_INLINE C one_of(const F& f, C x) {
  alignas(64) C y[Vec<C>::width];
  store(y, f(Vec<C>::set(x)));
  return y[0];
}

// Rows of X through f, columns cols .. padded set to 0, blocked rows all 0 and not read; tells whether every result is
// finite.
template <class T, class F>
ATTN_NOINLINE bool map_rows(const T* X, int64_t ld, int64_t rows, int64_t cols, F f, const uint8_t* blocked,
                            Compute<T>* Y, int64_t ldy, int64_t padded) {
  using C = Compute<T>;
  constexpr int W = Vec<C>::width;
  Finite<C> finite;
  for (int64_t k = 0; k < rows; k++) {
    const T* x = X + k * ld;
    C* y = Y + k * ldy;
    if (blocked && blocked[k]) {
      memset(y, 0, size_t(padded) * sizeof(C));
      continue;
    }
    int64_t d = 0;
    for (; d + W <= cols; d += W) {
      const Vec<C> v = f(load(x + d));
      finite.see(v);
      store(y + d, v);
    }
    for (; d < cols; d++) {
      y[d] = f(C(load_one(x + d)));
      finite.see(y[d]);
    }
    for (; d < padded; d++) y[d] = C(0);
  }
  return finite.all();
}

// Y = G * slope(X) row by row, 0 in blocked rows: a gradient carried back through a feature map. Y: a tensor
template <class X_, class T, class F>
ATTN_NOINLINE void scale_by_slope(const Compute<T>* G, int64_t ldg, const X_* X, int64_t ldx, int64_t rows,
                                  int64_t cols, F slope, const uint8_t* blocked, T* Y) {
  using C = Compute<T>;
  constexpr int W = Vec<C>::width;
  for (int64_t k = 0; k < rows; k++) {
    const C* g = G + k * ldg;
    const X_* x = X + k * ldx;
    T* y = Y + k * cols;
    if (blocked && blocked[k]) {
      memset(static_cast<void*>(y), 0, size_t(cols) * sizeof(T));
      continue;
    }
    int64_t d = 0;
    for (; d + W <= cols; d += W) store(y + d, load(g + d) * slope(load(x + d)));
    for (; d < cols; d++) store_one(y + d, g[d] * slope(C(load_one(x + d))));
  }
}

}  // namespace
}  // namespace attnjourney
