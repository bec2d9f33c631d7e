// What the softmax of a row comes to: its reference, 1 / its sum and the logarithm of that; and what a sink adds to it.
#pragma once
#include "units.h"

namespace attnjourney {
namespace {

// A weight is inverse * 2^(score - reference), the scores in the unit of the call. Exact where scores are the same
// numbers again, however large: the rounding of lse is not part of it.
template <class Real>
struct RowStats {
  Real reference, inverse;  // 0, 0: no key is visible
};

template <class Real>
struct RowSum {
  RowStats<Real> stats;
  Real lse;
  Real inverse;  // for sums of values against the reference that was given
};

template <class Real>
ATTN_INLINE Real natural_lse(double reference, double sum, const ScoreUnit& unit) {
  return Real(reference / unit.scores + __builtin_log(sum));
}

// `sum`: of the visible keys against `reference`
template <class Real>
ATTN_INLINE RowSum<Real> row_sum(Real reference, Real sum, const ScoreUnit& unit) {
  if (sum == Real(0)) return {{0, 0}, -Real(__builtin_inff()), 0};
  const Real inverse = Real(1) / sum;
  return {{reference, inverse}, natural_lse<Real>(double(reference), double(sum), unit), inverse};
}

// A sink in the unit of scores; where that is beyond the largest number of the arithmetic, that number.
template <class Real>
ATTN_INLINE double sink_score(double sink, const ScoreUnit& unit) {
  constexpr double largest = sizeof(Real) == 4 ? double(__FLT_MAX__) : __DBL_MAX__;
  const double score = sink * unit.scores;
  return score > largest ? largest : score < -largest ? -largest : score;
}

// the same with a sink
template <class Real>
ATTN_NOINLINE RowSum<Real> row_sum(double sink, Real reference, Real sum, const ScoreUnit& unit) {
  const double score = sink_score<Real>(sink, unit);
  if (sum == Real(0)) return {{Real(score), Real(1)}, Real(sink), 0};  // no key is visible
  const double above = (score - double(reference)) * unit.exponents;
  if (above < 60) {
    const Real whole = sum + Real(__builtin_exp2(above)), inverse = Real(1) / whole;
    return {{reference, inverse}, natural_lse<Real>(double(reference), double(whole), unit), inverse};
  }
  // the sink is the larger by far: it is the reference
  const Real own = Real(score);
  const double rest = double(sum) * __builtin_exp2((double(reference) - double(own)) * unit.exponents);
  const double whole = rest + __builtin_exp2((score - double(own)) * unit.exponents);
  return {{own, Real(1 / whole)}, Real(sink + __builtin_log1p(rest)), Real(rest / whole / double(sum))};
}

// Whether scores about as large as this one may differ by the order of their sums: weights change by 1e-7 of them. A
// NaN may.
template <class Real>
ATTN_INLINE bool scores_repeat(Real score, const ScoreUnit& unit) {
  const double limit = 320 / unit.exponents, size = double(score < 0 ? -score : score);
  return !(size > limit) || size == __builtin_inf();
}

// The weight of a sink in its row.
template <class Real>
ATTN_INLINE double sink_weight(double sink, const RowStats<Real>& stats, const ScoreUnit& unit) {
  const double score = sink_score<Real>(sink, unit);
  return __builtin_exp2((score - double(stats.reference)) * unit.exponents) * double(stats.inverse);
}

// Those of one row of a head, as the forward left them; from lse alone with its rounding.
template <class Real>
ATTN_INLINE RowStats<Real> row_stats(const HeadPointers& head, int64_t row, const ScoreUnit& unit) {
  if (head.stats) {
    const Real* const both = static_cast<const Real*>(head.stats) + 2 * row;
    return {both[0], both[1]};
  }
  const Real lse = static_cast<const Real*>(head.lse)[row];
  if (lse == -Real(__builtin_inff())) return {0, 0};
  const double score = double(lse) * unit.scores;
  const Real reference = Real(score);
  return {reference, Real(__builtin_exp2((double(reference) - score) * unit.exponents))};
}

// The least exponent of 2^(score - reference) that leaves a weight a normal number, times 2: for a weight of 0 is a
// hidden one.
template <class Real>
ATTN_INLINE Real least_exponent(Real inverse) {
  constexpr int least = sizeof(Real) == 4 ? -125 : -1021;
  if (!(inverse > Real(0) && inverse < Real(1))) return Real(least);
  const double wide = double(inverse);
  uint64_t bits;
  memcpy(&bits, &wide, 8);
  return Real(least - (int(bits >> 52) - 1023));
}

}  // namespace
}  // namespace attnjourney
