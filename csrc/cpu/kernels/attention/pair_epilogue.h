// The softmax epilogue of the forward by pairs of bfloat16 numbers: the weights of two keys rounded side by side,
// against a reference that moves only when a row leaves its range. The sum counts the rounded weights, too: they are
// what the output is divided by.
#pragma once
#include "cpu/kernels/common/exp2.h"
#include "cpu/kernels/common/score_modifier.h"
#include "pair_stream.h"

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

// Of width queries.
struct RunningQueries {
  Vf reference;   // negated
  Vf top, total;  // the largest score so far, the sum of the block's weights
  Vf rounded;     // and of the rounded ones
};

// Matrix: scores come from a matrix unit, by way of memory.
template <bool Matrix>
struct ForwardEpilogue {
  using Queries = RunningQueries;
  static constexpr int width = Vf::width, most = 1, count = 1;
  static constexpr int64_t tile = PairTiles::tile;
  static constexpr bool matrix = Matrix, modifies = true;

  PairTask task;
  PairTerm terms[1];
  Queries* queries;     // [tile / width]
  const float* bias;    // [key][tile]
  uint32_t* weights;    // [key / 2][tile]
  Vf scale, factor;     // plain_factor and query_factor
  Vf exponents;         // of a score beside a mask, see common/units.h
  const float* scores;  // of a matrix unit: [key][tile], keys from `first_key` of the block on
  int64_t first_key;

  ATTN_INLINE void clear(int64_t at) const { store_pairs(weights + at, Pairs{}); }
  template <int M, int N>
  ATTN_INLINE void load_scores(Vf (&t)[M][N], int64_t lane0, int64_t k) const {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) t[r][j] =
        load(scores + (k - first_key + r) * tile + lane0 + width * j);
  }
  struct Cursor {
    Queries* queries;
    uint32_t* weights;
    const float* bias;
    int64_t lane;
    ATTN_INLINE void next_vector() {
      queries++;
      weights += width;
      bias += width;
      lane += width;
    }
    ATTN_INLINE void next_keys(int vectors) {
      queries -= vectors;
      weights += tile - vectors * width;
      bias += 2 * tile - vectors * width;
      lane -= vectors * width;
    }
  };
  ATTN_INLINE Cursor cursor(int64_t lane, int64_t key, Queries* at) const {
    return {at, weights + key / 2 * tile + lane, bias + key * tile + lane, lane};
  }
  template <Hidden H>
  ATTN_INLINE void softmax(const PendingScores& pending, const Vf (&products)[2], const Cursor& at) const {
    constexpr bool guard = H == Hidden::by_range || H == Hidden::by_bias;
    const Alibi<float>& alibi = task.alibi;
    Queries& mine = *at.queries;
    const Vf reference = mine.reference, zero = Vf::zero(), hidden = Vf::set(-__builtin_inff());
    Vf weight[2] = {zero, zero};
    ATTN_UNROLL for (int r = 0; r < 2; r++) {
      const int64_t key = pending.key + r;
      if (guard && key >= pending.end) break;  // a last single key is paired with weight 0
      // rounded after every step, as the maximum that the reference came from
      Vf score = products[r] * scale;
      if constexpr (H == Hidden::by_sum) score = score + load(at.bias + r * tile);
      if (H == Hidden::by_alibi || (H == Hidden::by_range && alibi.on))
        score = alibi.add(score, alibi.distance(Vf::iota(), at.lane, key));
      if constexpr (H == Hidden::by_bias) {
        const Vf added = load(at.bias + r * tile);
        const auto gone = eq(added, hidden);
        score = select(gone, hidden, score + added);
        weight[r] = select(gone, zero, exp2_short((score + reference) * exponents));
      } else if constexpr (H == Hidden::by_range) {
        const auto range = lane_range<float>(*task.keys, task.first_row + at.lane, task.k0 + key);
        const auto visible = range.visible(Vf::iota());
        score = select(visible, score, hidden);
        weight[r] = select(visible, exp2_short(score + reference, least_of_rising<float>), zero);
      } else {
        const Vf t = H == Hidden::by_sum ? (score + reference) * exponents : score + reference;
        weight[r] = H == Hidden::by_alibi ? exp2_short(t, least_of_rising<float>) : exp2_short(t);
      }
      mine.top = max(mine.top, score);
    }
    const Pairs pair = round_pairs(weight[0], weight[1]);
    mine.total = mine.total + (weight[0] + weight[1]);
    mine.rounded = add_pairs(mine.rounded, pair);
    store_pairs(at.weights, pair);
  }
  // scores -> modified ones, in their unit
  ATTN_NOINLINE void modify(float* x, const float*, int n) const {
    const float cap = task.modifier.cap;
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
};

}  // namespace
}  // namespace attnjourney
