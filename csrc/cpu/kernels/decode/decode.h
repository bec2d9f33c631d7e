// Attention of a few query rows over many keys, as decoding beside a cache needs it: bound by memory, so every key and
// every value is read once, in its stored dtype, for all rows that share its head.
//
// A chunk of keys gives an unnormalised output, the largest score and the sum of exponentials per row; `merge` joins
// the chunks. Within a chunk, blocks of keys: scores as dot products with lanes over the head dimension (as many sums
// as registers allow are reduced together), then P V with lanes over the value dimension. Lines are asked for ahead of
// both products, at an even pace (decode/line_prefetch.h).
#pragma once
#include "cpu/kernels/common/common.h"
#include "cpu/kernels/common/exp2.h"
#include "cpu/kernels/common/log_sum.h"
#include "cpu/kernels/common/softcap.h"
#include "decode/params.h"
#include "decode_bias.h"
#include "row_products.h"

namespace attnjourney {
namespace {

// Products in other instructions, for `rows` rows together: none.
struct NoDot {
  static constexpr bool on = false;
  static constexpr int rows = 0, lanes = 1;
};

template <class T, class Dot = NoDot>
struct Decode {
  using Products = RowProducts<T>;
  using C = Compute<T>;
  using V = Vec<C>;
  static constexpr int W = V::width;
  static constexpr int max_rows = Products::max_rows;
  static constexpr C lowest = sizeof(C) == 4 ? C(-3.4e38) : C(-1.79e308);
  static constexpr C infinity = C(__builtin_inff());

  // rows of one pass, passes, and keys of one block
  struct Shape {
    int64_t rows, groups, keys, qd, vd;
    ATTN_INLINE Shape(const DecodeParams& p, int64_t count) {
      rows = count >= 5 ? 8 : count >= 3 ? 4 : count;
      groups = (count + rows - 1) / rows;
      // 16 KB of keys; where many passes read queries and outputs again for every block, what the second-level cache
      // holds
      const int64_t row = p.head_dim * int64_t(sizeof(T));
      keys = groups > 1 ? 64 : max_of(16, min_of(1024, 16384 / row / 16 * 16));
      const int64_t lanes = Dot::on ? Dot::lanes : W;
      qd = round_up(p.head_dim, lanes);
      vd = round_up(p.v_head_dim, lanes);
    }
    int64_t score_size() const { return keys * rows + Products::sums_at_once * 2; }
  };
  static ATTN_INLINE bool biased(const DecodeParams& p) { return p.mask != MaskKind::none || p.alibi; }
  // numbers of C
  static int64_t space(const DecodeParams& p, int64_t count) {
    const Shape s(p, count);
    return s.groups * (s.rows * s.qd + s.score_size()) + s.rows * s.vd + (biased(p) ? s.score_size() : 0) +
           (Dot::on ? s.score_size() / 2 : 0);
  }
  // one chunk's result: out [rows][vd], largest [rows], sum [rows], with Dot the sum of the rounded weights [rows]
  static int64_t partial_size(const DecodeParams& p, int64_t count) {
    const Shape s(p, count);
    return round_up(s.groups * s.rows * (s.vd + 2 + Dot::on), 64 / int64_t(sizeof(C)));
  }

  // n a multiple of W
  static ATTN_INLINE bool finite(const C* x, int64_t n) {
    V bad = V::zero();  // 0 x is 0 for a finite x, else NaN
    for (int64_t i = 0; i < n; i += W) bad = fma(load(x + i), V::zero(), bad);
    return finite_bits(bad);
  }

  template <int R>
  static constexpr bool by_dot = Dot::on && R == Dot::rows;

  // Scores S[n][R] of keys k0 .. of the rows from `row` on -> weights; O, m, l brought to the new largest score. By Dot
  // weights are rounded: `rounded` is their sum then, which goes with O, and l still what they were.
  template <int R>
  static ATTN_NOINLINE void softmax(const DecodeParams& p, int64_t row, int64_t count, int64_t k0, int64_t n,
                                    bool border, C* S, const C* B, C* O, int64_t vd, C* m, C* l, C* rounded) {
    constexpr int period = R > W ? R : W, NV = period / W;  // lane i of a period is row i % R
    const int64_t total = n * R, end = round_up(total, period);
    const auto fill_hidden = [&](C x) {
      for (int64_t i = total; i < end; i++) S[i] = x;
      if (!border) return;
      for (int r = 0; r < R; r++) {
        if (r >= count) continue;  // a row that only fills the registers
        const int64_t t = (row + r) % p.q_len;
        const VisibleKeys seen = p.keys.row(t).from(k0);
        for (int64_t k = max_of(0, seen.prefix); k < min_of(n, seen.begin); k++) S[k * R + r] = x;
        for (int64_t k = max_of(0, seen.end); k < n; k++) S[k * R + r] = x;
      }
    };
    if (p.softcap > 0) cap_scores(S, int(end / W), C(p.softcap * log2_e));
    if (B)
      for (int64_t i = 0; i < end; i += W) {  // a NaN in a hidden key must not show
        const V b = load(B + i), hidden = V::set(-infinity);
        store(S + i, select(eq(b, hidden), hidden, load(S + i) + b));
      }
    fill_hidden(-infinity);
    V top[NV];
    ATTN_UNROLL for (int v = 0; v < NV; v++) top[v] = V::set(lowest);
    for (int64_t i = 0; i < end; i += period)
      ATTN_UNROLL for (int v = 0; v < NV; v++) top[v] = max(load(S + i + v * W), top[v]);
    C t[period], reference[period];
    ATTN_UNROLL for (int v = 0; v < NV; v++) store(t + v * W, top[v]);
    for (int r = 0; r < R; r++) {
      C x = m[r];
      for (int i = r; i < period; i += R) x = t[i] > x ? t[i] : x;
      if (x > m[r]) {
        const C shrink = sizeof(C) == 4 ? C(__builtin_exp2f(float(m[r] - x))) : C(__builtin_exp2(double(m[r] - x)));
        m[r] = x;
        l[r] *= shrink;
        if constexpr (by_dot<R>) rounded[r] *= shrink;
        for (int64_t d = 0; d < vd; d += W) store(O + r * vd + d, load(O + r * vd + d) * V::set(shrink));
      }
      for (int i = r; i < period; i += R) reference[i] = x;
    }
    for (int64_t i = 0; i < end; i += period)
      ATTN_UNROLL for (int v = 0; v < NV; v++)
          store(S + i + v * W, exp2(load(S + i + v * W) - load(reference + v * W)));
    fill_hidden(C(0));  // exp2 of a hidden score is not 0
    if (B)
      for (int64_t i = 0; i < end; i += W)
        store(S + i, select(eq(load(B + i), V::set(-infinity)), V::zero(), load(S + i)));
    const auto add_all = [&](C* total, auto&& weight) {
      ATTN_UNROLL for (int v = 0; v < NV; v++) top[v] = V::zero();
      for (int64_t i = 0; i < end; i += period)
        ATTN_UNROLL for (int v = 0; v < NV; v++) top[v] = top[v] + weight(S + i + v * W);
      ATTN_UNROLL for (int v = 0; v < NV; v++) store(t + v * W, top[v]);
      for (int i = 0; i < period; i++) total[i % R] += t[i];
    };
    add_all(l, [](const C* x) { return load(x); });
    if constexpr (by_dot<R>)
      add_all(rounded, [](C* x) {
        const V y = Dot::rounded(load(x));
        store(x, y);
        return y;
      });
  }

  // of R rows, times the factor: float, where products are by pairs as they lie in memory
  template <int R>
  static void copy_queries(const DecodeParams& p, const DecodeRows& rows, const Shape& s, C factor, C* q) {
    T* const pairs = reinterpret_cast<T*>(q);
    for (int64_t i = 0; i < s.groups * R; i++) {
      int64_t d = 0;
      if (i < rows.count) {
        const int64_t at = rows.first + i;
        const T* x = static_cast<const T*>(rows.query) + at / p.q_len * p.q_head + at % p.q_len * p.q_row;
        for (; d < p.head_dim; d++)
          if constexpr (by_dot<R>)
            pairs[i * s.qd + d] = x[d];
          else
            q[i * s.qd + d] = load_one(x + d) * factor;
      }
      for (; d < s.qd; d++)
        if constexpr (by_dot<R>)
          pairs[i * s.qd + d] = T{};
        else
          q[i * s.qd + d] = C(0);
    }
  }

  static LinesAhead lines_ahead(const DecodeParams& p, const Shape& s, const DecodeRun* runs, const BlockWalk& walk) {
    constexpr int64_t size = sizeof(T);
    const T* const key = static_cast<const T*>(runs->key);
    const T* const value = static_cast<const T*>(runs->value);
    const bool inside = value >= key && value + p.v_head_dim <= key + p.head_dim && p.v_row == p.k_row;
    const int64_t key_bytes = p.head_dim * size, value_bytes = inside ? 0 : p.v_head_dim * size;
    const int64_t bytes = key_bytes + value_bytes, v_passes = s.rows > Products::pv_rows ? 2 : 1;
    const int64_t units = s.groups * max_of(1, p.head_dim / W + p.v_head_dim / W * v_passes);  // for one key
    LinesAhead ahead(runs, walk, key_bytes, p.k_row * size, value_bytes, p.v_row * size);
    // several passes: the next block while this one is worked on. One: few rows run ahead by themselves
    ahead.start(bytes, units, s.groups > 1 ? s.keys * bytes : s.rows > 2 ? 16384 : 8192);
    return ahead;
  }

  template <int R>
  static void run_chunk(const DecodeParams& p, const DecodeRows& rows, const DecodeRun* runs, int64_t n_runs,
                        C* partial, C* space) {
    const Shape s(p, rows.count);
    C *const q = space, *const S = q + s.groups * R * s.qd;
    C *const O = partial, *const m = O + s.groups * R * s.vd, *const l = m + s.groups * R,
             *const rounded = l + s.groups * R;
    C* const before = S + s.groups * s.score_size();  // one group's O
    C* const pairs = before + R * s.vd;               // one group's weights for Dot
    C* const B = biased(p) ? pairs + (Dot::on ? s.score_size() / 2 : 0) : nullptr;
    const C factor = query_factor<C>(p);
    copy_queries<R>(p, rows, s, factor, q);
    for (int64_t i = 0; i < s.groups * R; i++) {
      m[i] = lowest;
      l[i] = 0;
      if (Dot::on) rounded[i] = 0;
    }
    memset(O, 0, sizeof(C) * size_t(s.groups * R * s.vd));
    if (n_runs == 0) return;
    const VisibleKeys all = p.keys.all(0, p.q_len - 1);
    bool unseen[decode_row_block / max_rows];  // groups of which the mask hides every key of the block
    BlockWalk walk(runs, n_runs, s.keys);
    LinesAhead ahead = lines_ahead(p, s, runs, walk);
    const auto of_keys = [&](const DecodeRun& run, int64_t k) { return static_cast<const T*>(run.key) + k * p.k_row; };
    const auto of_values = [&](const DecodeRun& run, int64_t k) {
      return static_cast<const T*>(run.value) + k * p.v_row;
    };
    for (DecodeBlock b; walk.next(b);) {
      const int64_t n = b.count;
      const bool border = !all.one_holds(b.first, b.first + n);
      bool hides = border;
      for (int64_t g = 0; g < s.groups; g++) {
        C* w = S + g * s.score_size();
        const int64_t row = rows.first + g * R, count = rows.count - g * R;
        const MaskBlock mask = DecodeBias<T, R>::block(p, rows, row, count, b.first, n, B);
        unseen[g] = mask == MaskBlock::all_hidden;
        if (unseen[g]) continue;
        hides |= mask == MaskBlock::some_hidden;
        BlockWalk::pieces(runs, b, [&](const DecodeRun& run, int64_t k, int64_t count, int64_t done) {
          if constexpr (by_dot<R>)
            Dot::scores(reinterpret_cast<const T*>(q) + g * R * s.qd, s.qd, of_keys(run, k), p.k_row, p.head_dim, count,
                        factor, w + done * R, ahead);
          else
            Products::template scores<R>(q + g * R * s.qd, s.qd, of_keys(run, k), p.k_row, p.head_dim, count,
                                         w + done * R, ahead);
        });
        softmax<R>(p, row, count, b.first, n, border, w, has_block(mask) ? B : nullptr, O + g * R * s.vd, s.vd,
                   m + g * R, l + g * R, rounded + g * R);
      }
      for (int64_t g = 0; g < s.groups; g++) {
        if (unseen[g]) continue;
        const C* w = S + g * s.score_size();
        C* o = O + g * R * s.vd;
        if (hides) memcpy(before, o, sizeof(C) * size_t(R * s.vd));
        BlockWalk::pieces(runs, b, [&](const DecodeRun& run, int64_t k, int64_t count, int64_t done) {
          if constexpr (by_dot<R>)
            Dot::weighted_values(w + done * R, count, of_values(run, k), p.v_row, p.v_head_dim, o, s.vd, pairs, ahead);
          else
            Products::template weighted_values<R>(w + done * R, count, of_values(run, k), p.v_row, p.v_head_dim, o,
                                                  s.vd, ahead);
        });
        if (hides && !finite(o, R * s.vd)) {
          memcpy(o, before, sizeof(C) * size_t(R * s.vd));
          BlockWalk::pieces(runs, b, [&](const DecodeRun& run, int64_t k, int64_t count, int64_t done) {
            Products::weighted_values_guarded(w + done * R, R, count, of_values(run, k), p.v_row, p.v_head_dim, o,
                                              s.vd);
          });
        }
      }
    }
  }

  // rows against the keys of the runs; all of them lie within what any row may see
  static void chunk(const DecodeParams& p, const DecodeRows& rows, const DecodeRun* runs, int64_t n_runs, void* partial,
                    void* space) {
    C *const o = static_cast<C*>(partial), *const w = static_cast<C*>(space);
    switch (Shape(p, rows.count).rows) {
      case 1:
        return run_chunk<1>(p, rows, runs, n_runs, o, w);
      case 2:
        return run_chunk<2>(p, rows, runs, n_runs, o, w);
      case 4:
        return run_chunk<4>(p, rows, runs, n_runs, o, w);
      default:
        return run_chunk<8>(p, rows, runs, n_runs, o, w);
    }
  }

  // partials of `chunks` chunks, partial_size apart, in the order of the keys -> out, lse; the first one is overwritten
  static void merge(const DecodeParams& p, const DecodeRows& rows, void* partials, int64_t chunks) {
    const Shape s(p, rows.count);
    const int64_t size = partial_size(p, rows.count), all_rows = s.groups * s.rows;
    const bool by_pairs = Dot::on && s.rows == Dot::rows;
    C* const first = static_cast<C*>(partials);
    for (int64_t i = 0; i < rows.count; i++) {
      const C* largest = first + all_rows * s.vd + i;
      const C* sums_of = largest + all_rows;
      const C* rounded = by_pairs ? sums_of + all_rows : sums_of;
      C top = lowest, sum = 0, divisor = 0;
      for (int64_t c = 0; c < chunks; c++) top = largest[c * size] > top ? largest[c * size] : top;
      C* o = first + i * s.vd;
      for (int64_t c = 0; c < chunks; c++) {
        const C w = sizeof(C) == 4 ? C(__builtin_exp2f(float(largest[c * size] - top)))
                                   : C(__builtin_exp2(double(largest[c * size] - top)));
        sum += w * sums_of[c * size];
        divisor += w * rounded[c * size];
        for (int64_t d = 0; d < s.vd; d += W) {
          const V x = load(o + c * size + d) * V::set(w);
          store(o + d, c ? load(o + d) + x : x);
        }
      }
      const double sink = rows.sinks ? rows.sinks[(rows.first + i) / p.q_len] : -__builtin_inf();
      C inverse = divisor == C(0) ? C(0) : C(1) / divisor, lse = natural_lse(top, sum);
      if (sink != -__builtin_inf()) {
        C unused;
        add_sink(sink, top, sum, unused, lse);
        add_sink(sink, top, divisor, inverse, unused);
      }
      const int64_t at = rows.first + i;
      T* out = static_cast<T*>(rows.out) + at * p.v_head_dim;
      for (int64_t d = 0; d < p.v_head_dim; d++) store_one(out + d, o[d] * inverse);
      static_cast<C*>(rows.lse)[at] = lse;
    }
  }
};

}  // namespace
}  // namespace attnjourney
