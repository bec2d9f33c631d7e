// What is done to scores before any mask (ScoreModifier): softcap, by which s becomes cap * tanh(s / cap) (Gemma 2,
// arXiv 2408.00118). Other kernels know of it only these functions; what derivatives need of a score is one number, its
// `state`: tanh. Queries are packed with 2 log2(e) / cap folded in, so that a product z gives (2^z - 1) / (2^z + 1).
#pragma once
#include "attention/params.h"
#include "units.h"

namespace attnjourney {
namespace {

// what packed queries are multiplied by
template <class Real, class Params>
ATTN_INLINE Real query_factor(const Params& params) {
  const ScoreModifier& m = params.modifier;
  return Real(m.on() ? params.scale / m.softcap * (2 * log2_e) : params.scale * score_unit(params).scores);
}
// what a product with them is multiplied by to be a scaled score, not yet modified
template <class Real>
ATTN_INLINE Real score_factor(const AttentionParams& params) {
  return Real(params.modifier.on() ? params.modifier.softcap / (2 * log2_e) : 1 / score_unit(params).scores);
}
// what a product with queries as they are is multiplied by to be a score in its unit, or what a modifier takes
ATTN_INLINE float plain_factor(const AttentionParams& params) {
  return params.modifier.on() ? 1 : query_factor<float>(params);
}

template <class Real>
struct Modifier {
  Real cap;  // in the unit of scores, 0 for none
  template <class Params>
  ATTN_INLINE explicit Modifier(const Params& params)
      : cap(Real(params.modifier.softcap * score_unit(params).scores)) {}
  ATTN_INLINE bool on() const { return cap != Real(0); }
  // the derivative f' of a modified score by the score, from its state
  ATTN_INLINE Vec<Real> slope(Vec<Real> state) const { return Vec<Real>::set(Real(1)) - state * state; }
};

// (2^f - 1) / f for |f| <= 1/2, by its Taylor series: exact to rounding, also where 2^f - 1 would cancel
ATTN_INLINE Vf power_quotient(Vf f) {
  Vf p = Vf::set(1.5252733804e-05f);
  p = fma(p, f, Vf::set(1.5403530393e-04f));
  p = fma(p, f, Vf::set(1.3333558146e-03f));
  p = fma(p, f, Vf::set(9.6181291076e-03f));
  p = fma(p, f, Vf::set(5.5504108665e-02f));
  p = fma(p, f, Vf::set(2.4022650696e-01f));
  return fma(p, f, Vf::set(6.9314718056e-01f));
}
ATTN_INLINE Vd power_quotient(Vd f) {
  Vd p = Vd::set(1.3691488853904129e-12);
  p = fma(p, f, Vd::set(2.5678435993488205e-11));
  p = fma(p, f, Vd::set(4.4455382718708116e-10));
  p = fma(p, f, Vd::set(7.0549116208011233e-09));
  p = fma(p, f, Vd::set(1.0178086009239699e-07));
  p = fma(p, f, Vd::set(1.3215486790144309e-06));
  p = fma(p, f, Vd::set(1.5252733804059840e-05));
  p = fma(p, f, Vd::set(1.5403530393381610e-04));
  p = fma(p, f, Vd::set(1.3333558146428443e-03));
  p = fma(p, f, Vd::set(9.6181291076284772e-03));
  p = fma(p, f, Vd::set(5.5504108664821580e-02));
  p = fma(p, f, Vd::set(2.4022650695910071e-01));
  return fma(p, f, Vd::set(6.9314718055994531e-01));
}

template <class Real>
ATTN_INLINE Vec<Real> tanh_of_packed(Vec<Real> z) {
  const Vec<Real> far =
      Vec<Real>::set(sizeof(Real) == 4 ? Real(40) : Real(80));  // tanh is 1 to rounding; a NaN stays one
  z = min(far, max(Vec<Real>::zero() - far, z));
  const Vec<Real> n = round(z), f = z - n, one = Vec<Real>::set(Real(1));
  const Vec<Real> power = scale_by_power(one, n);
  const Vec<Real> e = fma(power * f, power_quotient(f), power - one);  // 2^z - 1
  return e / (e + Vec<Real>::set(Real(2)));
}

// x[vectors * width]: products with packed queries -> modified scores in their unit
template <class Real>
ATTN_NOINLINE void modify_scores(Real* x, int vectors, Modifier<Real> modifier) {
  constexpr int width = Vec<Real>::width;
  const Vec<Real> cap = Vec<Real>::set(modifier.cap);
  for (int i = 0; i < vectors; i++) store(x + i * width, cap * tanh_of_packed(load(x + i * width)));
}

// ... and their states
template <class Real>
ATTN_NOINLINE void modify_scores(Real* x, int vectors, Modifier<Real> modifier, Real* states) {
  constexpr int width = Vec<Real>::width;
  const Vec<Real> cap = Vec<Real>::set(modifier.cap);
  for (int i = 0; i < vectors; i++) {
    const Vec<Real> t = tanh_of_packed(load(x + i * width));
    store(x + i * width, cap * t);
    store(states + i * width, t);
  }
}

// f'' / f' times the tangent of a scaled score
template <class Real>
class ModifierBend {
 public:
  ATTN_INLINE explicit ModifierBend(const ScoreModifier& m) : factor_(Vec<Real>::set(Real(-2 / m.softcap))) {}
  ATTN_INLINE Vec<Real> of(Vec<Real> state, Vec<Real> tangent) const { return factor_ * state * tangent; }

 private:
  const Vec<Real> factor_;
};

}  // namespace
}  // namespace attnjourney
