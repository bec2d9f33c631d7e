// The logarithm of a row's sum of exponentials, and what a sink adds to it.
#pragma once
#include "mask_tile.h"

namespace attnjourney {
namespace {

// reference in log2 units. A row whose scores are all at the lowest finite number keeps that as its lse.
template <class C>
ATTN_INLINE C natural_lse(C reference, C sum) {
  if (sum == C(0)) return -C(__builtin_inff());
  if (reference <= MaskValue<C>::lowest * C(0.999))
    return sizeof(C) == 4 ? C(-3.4028234663852886e38) : C(-1.7976931348623157e308);
  return C(double(reference) * ln_2 + __builtin_log(double(sum)));
}

// What a sink adds to a row: 1 / sum and the lse. `reference` in log2 units, `sum` of the visible keys against it.
template <class C>
ATTN_NOINLINE void add_sink(double sink, C reference, C sum, C& inverse, C& lse) {
  const double s = sink * log2_e, above = s - double(reference);
  if (sum == C(0)) {  // no key is visible
    lse = C(sink);
  } else if (above < 60) {
    const C whole = sum + C(__builtin_exp2(above));
    inverse = C(1) / whole;
    lse = natural_lse(reference, whole);
  } else {  // the sink is the larger by far: it is the reference
    const double weight = __builtin_exp2(-above), whole = 1 + double(sum) * weight;
    inverse = C(weight / whole);
    lse = C(sink + __builtin_log(whole));
  }
}

// -lse in log2 units, as the sum of two numbers; 0 where no key is visible: the masks make its weights 0
template <class C>
ATTN_INLINE void split_lse(C lse, C& minus, C& low) {
  double l = lse != -C(__builtin_inff()) ? double(lse) * log2_e : 0;
  l = l < double(MaskValue<C>::lowest) ? double(MaskValue<C>::lowest) : l;
  l = l > -double(MaskValue<C>::lowest) ? -double(MaskValue<C>::lowest) : l;  // a sink as large; a NaN stays one
  minus = C(-l);
  low = C(-l - double(minus));
}

}  // namespace
}  // namespace attnjourney
