// The softmax of few query rows over a block of keys, between the two products of attention by few rows.
#pragma once
#include "cpu/kernels/common/common.h"
#include "cpu/kernels/common/exp2.h"
#include "cpu/kernels/common/score_modifier.h"
#include "decode/params.h"

namespace attnjourney {
namespace {

// Products by pairs of bfloat16 numbers, for `rows` rows together: none.
struct NoPairs {
  static constexpr bool on = false;
  static constexpr int rows = 0, lanes = 1;
  // named, though in nothing that is compiled: clang looks them up
  template <class... X>
  static void scores(X&&...);
  template <class... X>
  static void weighted_values(X&&...);
};

// One function for all dtypes of a precision.
template <class Real, class ByPairs>
struct DecodeSoftmax {
  using V = Vec<Real>;
  static constexpr int width = V::width;
  static constexpr Real lowest = sizeof(Real) == 4 ? Real(-3.4028234663852886e38) : Real(-1.7976931348623157e308);
  static constexpr Real infinity = Real(__builtin_inff());

  // R rows of one pass against a block of keys.
  struct RowGroup {
    int64_t first, count;                    // rows of the call; those past `count` only fill the registers
    Real* scores;                            // [key][R], then the weights
    const Real* bias;                        // [key][R], -inf where hidden; or null
    Real *output, *largest, *sum, *rounded;  // of the chunk so far, see Decode::Partial
  };

  static ATTN_INLINE Real exp2_of(Real x) {
    return sizeof(Real) == 4 ? Real(__builtin_exp2f(float(x))) : Real(__builtin_exp2(double(x)));
  }

  // Scores of a block -> weights; what the chunk holds is brought to the new largest score. By pairs weights are
  // rounded: `rounded` is their sum then, which goes with the output, and `sum` still that of what they were.
  template <int R>
  static ATTN_NOINLINE void run(const DecodeParams& params, const RowGroup& group, int64_t vd, int64_t k0, int64_t n,
                                bool border) {
    constexpr int period = R > width ? R : width, vectors = period / width;  // lane i of a period is row i % R
    const int64_t total = n * R, end = round_up(total, period);
    Real* const scores = group.scores;
    const Real* const bias = group.bias;
    const auto fill_hidden = [&](Real x) {
      for (int64_t i = total; i < end; i++) scores[i] = x;
      if (!border) return;
      for (int r = 0; r < R; r++) {
        if (r >= group.count) continue;
        const VisibleKeys seen = params.keys.row((group.first + r) % params.q_len).from(k0);
        for (int64_t k = max_of(0, seen.prefix); k < min_of(n, seen.begin); k++) scores[k * R + r] = x;
        for (int64_t k = max_of(0, seen.end); k < n; k++) scores[k * R + r] = x;
      }
    };
    const auto each_period = [&](auto&& f) {  // f(vector of a period, its place)
      for (int64_t i = 0; i < end; i += period) ATTN_UNROLL for (int v = 0; v < vectors; v++) f(v, i + v * width);
    };
    if (params.modifier.on()) modify_scores(scores, int(end / width), Modifier<Real>(params));
    if (bias)
      for (int64_t i = 0; i < end; i += width) {  // a NaN in a hidden key must not show
        const V added = load(bias + i), hidden = V::set(-infinity);
        store(scores + i, select(eq(added, hidden), hidden, load(scores + i) + added));
      }
    fill_hidden(-infinity);
    V lanes[vectors];
    ATTN_UNROLL for (int v = 0; v < vectors; v++) lanes[v] = V::set(lowest);
    each_period([&](int v, int64_t at) { lanes[v] = max(load(scores + at), lanes[v]); });
    const Real exponents = Real(score_unit(params).exponents);
    Real of_lane[period], reference[period];
    ATTN_UNROLL for (int v = 0; v < vectors; v++) store(of_lane + v * width, lanes[v]);
    for (int r = 0; r < R; r++) {
      Real top = group.largest[r];
      for (int i = r; i < period; i += R) top = of_lane[i] > top ? of_lane[i] : top;
      if (top > group.largest[r]) {
        const Real shrink = exp2_of((group.largest[r] - top) * exponents);
        group.largest[r] = top;
        group.sum[r] *= shrink;
        if constexpr (ByPairs::on && R == ByPairs::rows) group.rounded[r] *= shrink;
        Real* const output = group.output + r * vd;
        for (int64_t d = 0; d < vd; d += width) store(output + d, load(output + d) * V::set(shrink));
      }
      for (int i = r; i < period; i += R) reference[i] = top;
    }
    each_period([&](int v, int64_t at) {
      store(scores + at, exp2((load(scores + at) - load(reference + v * width)) * V::set(exponents)));
    });
    fill_hidden(Real(0));  // exp2 of a hidden score is not 0
    if (bias)
      for (int64_t i = 0; i < end; i += width)
        store(scores + i, select(eq(load(bias + i), V::set(-infinity)), V::zero(), load(scores + i)));
    const auto add_all = [&](Real* sums, auto&& weight) {
      ATTN_UNROLL for (int v = 0; v < vectors; v++) lanes[v] = V::zero();
      each_period([&](int v, int64_t at) { lanes[v] = lanes[v] + weight(scores + at); });
      ATTN_UNROLL for (int v = 0; v < vectors; v++) store(of_lane + v * width, lanes[v]);
      for (int i = 0; i < period; i++) sums[i % R] += of_lane[i];
    };
    add_all(group.sum, [](const Real* x) { return load(x); });
    if constexpr (ByPairs::on && R == ByPairs::rows)
      add_all(group.rounded, [](Real* x) {
        const V weight = ByPairs::rounded(load(x));
        store(x, weight);
        return weight;
      });
  }
};

}  // namespace
}  // namespace attnjourney
