// Gates of a chunk. With b_i the sum of the logarithms g up to row i of the chunk, row i reads what row j has written
// times e^(b_i - b_j), and the state before the chunk times e^(b_i).
//
// A gate a head: the factors of pairs are a matrix, each the exponential of its own difference. A gate a channel: there
// the factor is a product, e^(b_i - r) e^(r - b_j) with r = b of the first row, on the rows of queries and keys. So a
// chunk ends before these would leave the range of exponents (Gates::limit); it may be a single row.
#pragma once
#include "cpu/kernels/linear/feature_map.h"
#include "linear/gated_params.h"

namespace attnjourney {
namespace {

// A sum and what its roundings have lost: differences of sums, and exponentials, keep the accuracy of their own size.
template <class X>
struct TwoSum {
  X high, low;
  ATTN_INLINE void add(X x) {
    const X sum = high + x, part = sum - high;
    low = low + ((high - (sum - part)) + (x - part));
    high = sum;
  }
};

// e^x: 0 below the exponent range, inf above it; a NaN stays
template <class Real>
ATTN_INLINE Vec<Real> gate_exp(Vec<Real> x) {
  constexpr Real least = sizeof(Real) == 4 ? Real(-86) : Real(-707), most = sizeof(Real) == 4 ? Real(88) : Real(709);
  const Vec<Real> e = exp_negative(min(Vec<Real>::set(most), x));  // in this order a NaN stays
  const Vec<Real> bounded = select(ge(x, Vec<Real>::set(most)), Vec<Real>::set(Real(__builtin_inf())), e);
  return select(ge(Vec<Real>::set(least), x), Vec<Real>::zero(), bounded);
}
template <class Real>
struct Gates {
  static constexpr int width = Vec<Real>::width;
  static constexpr int64_t chunk = Tuning::linear_chunk, lanes_ld = chunk + 64 / int64_t(sizeof(Real));
  static constexpr Real limit = sizeof(Real) == 4 ? Real(80) : Real(600);
  static constexpr Real lowest = Real(-10000);  // of a gate: its exponential is 0, and differences of sums are numbers

  // a gate a head, all by rows: e^(b_i), e^(b_last - b_i), and e^(b_i - b_j) [chunk][lanes_ld] for j <= i
  Real *read = nullptr, *write = nullptr, *pairs = nullptr;
  // a gate a channel: e^(b_i - r), e^(r - b_i) [chunk][ld]; e^r, e^(b_last - r) [ld]
  Real *up = nullptr, *down = nullptr, *first = nullptr, *last = nullptr;
  Real* total = nullptr;  // what the state is multiplied by over the chunk: a number, or [ld]
  Real *high = nullptr, *low = nullptr;
  int64_t ld = 0, cols = 0;

  Gates() = default;
  template <class Space>
  Gates(Gate gate, int64_t key_ld, int64_t key_cols, Space& scratch) : ld(key_ld), cols(key_cols) {
    if (gate == Gate::none) return;
    const bool head = gate == Gate::head;
    const int64_t sums = head ? chunk : ld;
    total = scratch.template take<Real>(head ? width : ld);
    high = scratch.template take<Real>(sums);
    low = scratch.template take<Real>(sums);
    if (head) {
      read = scratch.template take<Real>(chunk);
      write = scratch.template take<Real>(chunk);
      pairs = scratch.template take<Real>(chunk * lanes_ld);
    } else {
      up = scratch.template take<Real>(chunk * ld);
      down = scratch.template take<Real>(chunk * ld);
      first = scratch.template take<Real>(ld);
      last = scratch.template take<Real>(ld);
    }
  }

  // Fills all of it for up to `count` rows from `gate` on, `row` apart; returns how many rows the chunk has.
  int64_t fill(Gate kind, const Real* gate, int64_t row, int64_t count, int64_t channels) {
    if (kind == Gate::none) return count;
    if (kind == Gate::head) return fill_head(gate, row, count), count;
    return fill_channels(gate, row, count, channels);
  }

 private:
  void fill_head(const Real* gate, int64_t row, int64_t n) {
    TwoSum<Real> sum{0, 0};
    for (int64_t i = 0; i < n; i++) {
      sum.add(gate[i * row] < lowest ? lowest : gate[i * row]);
      high[i] = sum.high, low[i] = sum.low;
    }
    for (int64_t i = n; i < chunk; i++) high[i] = low[i] = Real(0);
    const Vec<Real> last_high = Vec<Real>::set(high[n - 1]), last_low = Vec<Real>::set(low[n - 1]);
    for (int64_t j = 0; j < n; j += width) {
      const Vec<Real> h = load(high + j), l = load(low + j);
      store(read + j, gate_exp<Real>(h + l));
      store(write + j, gate_exp<Real>((last_high - h) + (last_low - l)));
    }
    for (int64_t i = 0; i < n; i++) {
      const Vec<Real> h = Vec<Real>::set(high[i]), l = Vec<Real>::set(low[i]);
      for (int64_t j = 0; j <= i; j += width)
        store(pairs + i * lanes_ld + j, gate_exp<Real>((h - load(high + j)) + (l - load(low + j))));
    }
    total[0] = read[n - 1];
  }

  ATTN_INLINE Vec<Real> bounded(Vec<Real> x) const { return max(Vec<Real>::set(lowest), x); }  // a NaN stays

  // a row of gates; those beyond the channels are 0
  ATTN_INLINE Vec<Real> gates_at(const Real* row, int64_t d, int64_t channels) const {
    if (d + width <= channels) return bounded(load(row + d));
    alignas(64) Real x[width];
    for (int64_t i = 0; i < width; i++) x[i] = d + i < channels ? row[d + i] : Real(0);
    return bounded(load(x));
  }

  int64_t fill_channels(const Real* gate, int64_t row, int64_t count, int64_t channels) {
    const Vec<Real> zero = Vec<Real>::zero(), one = Vec<Real>::set(Real(1)), most = Vec<Real>::set(limit);
    for (int64_t d = 0; d < cols; d += width) {
      store(first + d, gate_exp<Real>(gates_at(gate, d, channels)));
      store(high + d, zero), store(low + d, zero);
      store(up + d, one), store(down + d, one);
    }
    int64_t n = 1;
    for (; n < count; n++) {
      bool beyond = false;
      for (int64_t d = 0; d < cols && !beyond; d += width) {
        TwoSum<Vec<Real>> sum{load(high + d), load(low + d)};
        sum.add(gates_at(gate + n * row, d, channels));
        beyond = any(either(ge(sum.high, most), ge(zero - most, sum.high)));
        store(high + d, sum.high), store(low + d, sum.low);
        const Vec<Real> of_high = gate_exp<Real>(sum.high), e = fma(of_high, sum.low, of_high);
        store(up + n * ld + d, e), store(down + n * ld + d, one / e);
      }
      if (beyond) break;
    }
    for (int64_t d = 0; d < cols; d += width) {
      const Vec<Real> e = load(up + (n - 1) * ld + d);
      store(last + d, e);
      store(total + d, e * load(first + d));
    }
    return n;
  }
};

}  // namespace
}  // namespace attnjourney
