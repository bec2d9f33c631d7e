// 2^t for t <= about 100, relative error 9e-8 (double: 4e-17 before rounding), 2^0 is 1. t below the exponent range,
// also -inf, gives the smallest normal number rather than 0: a visible key never has weight 0. A NaN stays one.
#pragma once
#include "common.h"

namespace attnjourney {
namespace {

// the same for -1/2 <= f <= 1/2, times Factor, a power of two
template <int Factor = 1>
ATTN_INLINE Vf exp2_fraction(Vf f) {
  constexpr float by = Factor;
  Vf p = Vf::set(by * 1.326472731e-03f);
  p = fma(p, f, Vf::set(by * 9.671512991e-03f));
  p = fma(p, f, Vf::set(by * 5.550733581e-02f));
  p = fma(p, f, Vf::set(by * 2.402224243e-01f));
  p = fma(p, f, Vf::set(by * 6.931470037e-01f));
  return fma(p, f, Vf::set(by));
}
template <int Factor = 1>
ATTN_INLINE Vf exp2(Vf t, Vf least) {
  t = max(least, t);  // in this order a NaN stays: the second operand is returned
  const Vf n = round(t);
  return scale_by_power(exp2_fraction<Factor>(t - n), n);
}
template <int Factor = 1>
ATTN_INLINE Vf exp2(Vf t, float least = -125.f) {
  return exp2<Factor>(t, Vf::set(least));
}

ATTN_INLINE Vd exp2_fraction(Vd f) {
  Vd p = Vd::set(4.4558179083360645e-10);
  p = fma(p, f, Vd::set(7.074194297288521e-09));
  p = fma(p, f, Vd::set(1.0178057087733941e-07));
  p = fma(p, f, Vd::set(1.3215432535912375e-06));
  p = fma(p, f, Vd::set(1.5252733841556773e-05));
  p = fma(p, f, Vd::set(0.00015403530463724353));
  p = fma(p, f, Vd::set(0.001333355814640647));
  p = fma(p, f, Vd::set(0.009618129107587256));
  p = fma(p, f, Vd::set(0.055504108664821625));
  p = fma(p, f, Vd::set(0.24022650695910158));
  p = fma(p, f, Vd::set(ln_2));
  return fma(p, f, Vd::set(1.0));
}
ATTN_INLINE Vd exp2(Vd t, Vd least) {
  t = max(least, t);
  const Vd n = round(t);
  return scale_by_power(exp2_fraction(t - n), n);
}
ATTN_INLINE Vd exp2(Vd t, double least = -1021.0) { return exp2(t, Vd::set(least)); }

}  // namespace
}  // namespace attnjourney
