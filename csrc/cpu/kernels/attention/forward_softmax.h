// The softmax of the forward with lanes over queries, a key at a time: shorter functions where weights are rounded to
// bfloat16, the state that it keeps of queries, and the weight of a key.
#pragma once
#include "cpu/kernels/common/exp2.h"
#include "cpu/kernels/common/score_modifier.h"
#include "forward_tile.h"

namespace attnjourney {
namespace {

// 2^t / exp2_unit to 4e-6, exact for t = 0, for a result that is rounded to bfloat16; as exp2 otherwise. A monic
// polynomial of degree 4 takes two multiplications if its coefficients are adapted; additions have units of their own
// (Knuth, TAOCP 4.6.4).
constexpr float exp2_unit = 9.570111520e-03f;
ATTN_INLINE Vf exp2_short(Vf t, float least = -125.f) {
  t = max(Vf::set(least), t);
  const Vf n = round(t), f = t - n;
  const Vf y = fma(f, f + Vf::set(2.421487037e+00f), Vf::set(3.169906685e+01f));
  return scale_by_power(fma(y, f + Vf::set(-4.657926231e+01f) + y, Vf::set(5.761803277e+02f)), n);
}

// Weights in their unit, by exp2_short or times a power of two.
template <bool Short, int Factor = 1>
struct WeightPower {
  static constexpr float unit = Short ? exp2_unit : 1.f / Factor;
  ATTN_INLINE Vf operator()(Vf t, float least = -125.f) const {
    return Short ? exp2_short(t, least) : exp2<Factor>(t, least);
  }
};

// cap * tanh(y) of z = 2 log2(e) y, to 1e-7 cap: as exact as an lse beside 16 bits need be
ATTN_INLINE Vf cap_short(Vf z, float cap) {
  const Vf far = Vf::set(40.f), one = Vf::set(1.f);
  z = min(far, max(Vf::zero() - far, z));  // a NaN stays one
  const Vf n = round(z), power = scale_by_power(exp2_fraction(z - n), n);
  return fma(Vf::set(-2 * cap), reciprocal(power + one), Vf::set(cap));
}

// ... for |y| <= 0.4, to 2e-8 cap
ATTN_INLINE Vf cap_near_zero(Vf y, float cap) {
  const Vf t = y * y;
  Vf p = Vf::set(-4.682573798e-02f);
  p = fma(p, t, Vf::set(1.325056708e-01f));
  p = fma(p, t, Vf::set(-3.332972613e-01f));
  p = fma(p, t, Vf::set(9.999995734e-01f));
  return y * Vf::set(cap) * p;
}

// ... for |y| <= 1, to 1e-7 cap
ATTN_INLINE Vf cap_middle(Vf y, float cap) {
  const Vf t = y * y;
  Vf p = Vf::set(9.637684687e-04f);
  p = fma(p, t, Vf::set(-5.951268468e-03f));
  p = fma(p, t, Vf::set(1.997326780e-02f));
  p = fma(p, t, Vf::set(-5.326582646e-02f));
  p = fma(p, t, Vf::set(1.331958344e-01f));
  p = fma(p, t, Vf::set(-3.333212930e-01f));
  p = fma(p, t, Vf::set(9.999996931e-01f));
  return y * Vf::set(cap) * p;
}

// products with queries as they are -> modified scores in their unit
ATTN_NOINLINE void modify_short(float* x, int n, Vf factor, float cap) {
  constexpr int width = Vf::width;
  const Vf to_y = factor * Vf::set(float(1 / (2 * log2_e)));
  Vf high = Vf::zero();
  for (int i = 0; i < n; i++) {
    const Vf y = load(x + i * width) * to_y;
    high = max(max(y, Vf::zero() - y), high);
  }
  if (any(ge(high, Vf::set(1.f))))
    for (int i = 0; i < n; i++) store(x + i * width, cap_short(load(x + i * width) * factor, cap));
  else if (any(ge(high, Vf::set(0.4f))))
    for (int i = 0; i < n; i++) store(x + i * width, cap_middle(load(x + i * width) * to_y, cap));
  else
    for (int i = 0; i < n; i++) store(x + i * width, cap_near_zero(load(x + i * width) * to_y, cap));
}

// Of width queries.
struct RunningQueries {
  Vf reference;   // negated
  Vf top, total;  // the largest score so far, the sum of the block's weights
  Vf rounded;     // and of the rounded ones
};

// From products of a tile with a key block to weights.
struct TileScores {
  const KeyRanges& keys;
  int64_t first_row, k0;
  Vf scale;      // plain_factor
  Vf exponents;  // of a score beside a mask, see common/units.h
  Alibi<float> alibi;
  ATTN_INLINE TileScores(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t k0_,
                         MaskBlock masked)
      : keys(params.keys),
        first_row(first),
        k0(k0_),
        scale(Vf::set(plain_factor(params))),
        exponents(Vf::set(float(score_unit(params).exponents))),
        alibi(alibi_of<float>(params, head, first, k0_, masked)) {}
};

// The weight of one key for a vector of rows, from lane `lane` of the tile on, and the largest score with it.
// Power: WeightPower. bias: what is added, with by_bias and by_sum.
template <Hidden H, class Power>
ATTN_INLINE Vf weight_of(const TileScores& x, Vf product, int64_t lane, int64_t key, const float* bias,
                         RunningQueries& mine) {
  constexpr Power power{};
  const Vf reference = mine.reference, zero = Vf::zero(), hidden = Vf::set(-__builtin_inff());
  // rounded after every step, as the maximum that the reference came from
  Vf score = product * x.scale, weight;
  if constexpr (H == Hidden::by_sum) score = score + load(bias);
  if (H == Hidden::by_alibi || (H == Hidden::by_range && x.alibi.on))
    score = x.alibi.add(score, x.alibi.distance(Vf::iota(), lane, key));
  if constexpr (H == Hidden::by_bias) {
    const Vf added = load(bias);
    const auto gone = eq(added, hidden);
    score = select(gone, hidden, score + added);
    weight = select(gone, zero, power((score + reference) * x.exponents));
  } else if constexpr (H == Hidden::by_range) {
    const auto visible = lane_range<float>(x.keys, x.first_row + lane, x.k0 + key).visible(Vf::iota());
    score = select(visible, score, hidden);
    weight = select(visible, power(score + reference, least_of_rising<float>), zero);
  } else {
    const Vf t = H == Hidden::by_sum ? (score + reference) * x.exponents : score + reference;
    weight = H == Hidden::by_alibi ? power(t, least_of_rising<float>) : power(t);
  }
  mine.top = max(mine.top, score);
  return weight;
}

}  // namespace
}  // namespace attnjourney
