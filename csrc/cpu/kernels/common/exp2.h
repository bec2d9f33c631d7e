// 2^t for t <= about 100, relative error 7e-8 (double: 4e-17 before rounding). t below the exponent range, also -inf,
// gives the smallest normal number rather than 0: a visible key never has weight 0. A NaN stays one.
#pragma once
#include "common.h"

namespace attnjourney {
namespace {

// the same for -1/2 <= f <= 1/2
ATTN_INLINE Vf exp2_fraction(Vf f) {
  Vf p = Vf::set(1.327647217e-03f);
  p = fma(p, f, Vf::set(9.675541331e-03f));
  p = fma(p, f, Vf::set(5.550713273e-02f));
  p = fma(p, f, Vf::set(2.402211972e-01f));
  p = fma(p, f, Vf::set(6.931469671e-01f));
  return fma(p, f, Vf::set(1.000000072e+00f));
}
ATTN_INLINE Vf exp2(Vf t, float least = -125.f) {
  t = max(Vf::set(least), t);  // in this order a NaN stays: the second operand is returned
  const Vf n = round(t);
  return scale_by_power(exp2_fraction(t - n), n);
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
ATTN_INLINE Vd exp2(Vd t, double least = -1021.0) {
  t = max(Vd::set(least), t);
  const Vd n = round(t);
  return scale_by_power(exp2_fraction(t - n), n);
}

}  // namespace
}  // namespace attnjourney
