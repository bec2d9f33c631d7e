// The logarithm of a row's sum of exponentials, and what a sink adds to it.
#pragma once
#include "mask_tile.h"

namespace attnjourney {
namespace {

// reference in log2 units. A row whose scores are all at the lowest finite number keeps that as its lse.
template <class Real>
ATTN_INLINE Real natural_lse(Real reference, Real sum) {
  if (sum == Real(0)) return -Real(__builtin_inff());
  if (reference <= MaskValue<Real>::lowest * Real(0.999))
    return sizeof(Real) == 4 ? Real(-3.4028234663852886e38) : Real(-1.7976931348623157e308);
  return Real(double(reference) * ln_2 + __builtin_log(double(sum)));
}

// What a sink adds to a row: 1 / sum and the lse. `reference` in log2 units, `sum` of the visible keys against it.
template <class Real>
ATTN_NOINLINE void add_sink(double sink, Real reference, Real sum, Real& inverse, Real& lse) {
  const double s = sink * log2_e, above = s - double(reference);
  if (sum == Real(0)) {  // no key is visible
    lse = Real(sink);
  } else if (above < 60) {
    const Real whole = sum + Real(__builtin_exp2(above));
    inverse = Real(1) / whole;
    lse = natural_lse(reference, whole);
  } else {  // the sink is the larger by far: it is the reference
    const double weight = __builtin_exp2(-above), whole = 1 + double(sum) * weight;
    inverse = Real(weight / whole);
    lse = Real(sink + __builtin_log(whole));
  }
}

// -lse in log2 units, as the sum of two numbers; 0 where no key is visible: the masks make its weights 0
template <class Real>
ATTN_INLINE void split_lse(Real lse, Real& minus, Real& low) {
  double l = lse != -Real(__builtin_inff()) ? double(lse) * log2_e : 0;
  l = l < double(MaskValue<Real>::lowest) ? double(MaskValue<Real>::lowest) : l;
  l = l > -double(MaskValue<Real>::lowest) ? -double(MaskValue<Real>::lowest) : l;  // a sink as large; a NaN stays one
  minus = Real(-l);
  low = Real(-l - double(minus));
}

}  // namespace
}  // namespace attnjourney
