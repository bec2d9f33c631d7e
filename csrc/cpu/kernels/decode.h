// Attention of a few query rows over many keys, as decoding beside a cache needs it: bound by memory, so every key and
// every value is read once, in its stored dtype, for all rows that share its head.
//
// A chunk of keys gives an unnormalised output, the largest score and the sum of exponentials per row; `merge` joins
// the chunks. Within a chunk, blocks of keys that fit the first-level cache: scores as dot products with lanes over the
// head dimension (as many sums as registers allow are reduced together), then P V with lanes over the value dimension.
// Each of the two products prefetches what the other reads next.
#pragma once
#include "../../decode_params.h"
#include "common.h"
#include "decode_bias.h"
#include "exp2.h"
#include "log_sum.h"
#include "softcap.h"

namespace attnjourney {
namespace {

// Vector number `part` / W of a row whose length need not be a multiple of W: the lanes past `n` are 0 and not read.
template <class T>
ATTN_NOINLINE Vec<Compute<T>> load_part(const T* p, int64_t n) {
  Compute<T> t[Vec<Compute<T>>::width] = {};
  for (int64_t i = 0; i < n; i++) t[i] = load_one(p + i);
  return load(t);
}

template <class T>
struct Decode {
  using C = Compute<T>;
  using V = Vec<C>;
  static constexpr int W = V::width;
  static constexpr int max_rows = 8;                          // rows that one pass over registers serves
  static constexpr int sums_at_once = W > 8 ? W : 8;          // dot products, one accumulator each
  static constexpr int pv_rows = Tuning::rows >= 8 ? 8 : 4;   // rows of P V in registers together
  static constexpr int pv_tile = Tuning::rows >= 8 ? 16 : 8;  // accumulators of P V
  static constexpr int line = 64 / int(sizeof(T));            // elements in a cache line
  static constexpr C lowest = sizeof(C) == 4 ? C(-3.4e38) : C(-1.79e308);
  static constexpr C infinity = C(__builtin_inff());

  static ATTN_INLINE int64_t padded(int64_t n) { return round_up(n, W); }

  // rows of one pass, passes, and keys of one block
  struct Shape {
    int64_t rows, groups, keys, qd, vd;
    ATTN_INLINE Shape(const DecodeParams& p, int64_t count) {
      rows = count >= 5 ? 8 : count >= 3 ? 4 : count;
      groups = (count + rows - 1) / rows;
      // 8 KB of keys; more where many passes read the queries and outputs again for every block
      const int64_t bytes = 8192 * min_of(groups, 8), row = max_of(p.head_dim, p.v_head_dim) * int64_t(sizeof(T));
      keys = max_of(16, min_of(1024, bytes / row / 16 * 16));
      qd = padded(p.head_dim);
      vd = padded(p.v_head_dim);
    }
    int64_t score_size() const { return keys * rows + sums_at_once * 2; }
  };
  static ATTN_INLINE bool biased(const DecodeParams& p) { return p.mask != MaskKind::none || p.alibi; }
  // numbers of C
  static int64_t space(const DecodeParams& p, int64_t count) {
    const Shape s(p, count);
    return s.groups * (s.rows * s.qd + s.score_size()) + s.rows * s.vd + (biased(p) ? s.score_size() : 0);
  }
  // one chunk's result: out [rows][vd], largest [rows], sum [rows]
  static int64_t partial_size(const DecodeParams& p, int64_t count) {
    const Shape s(p, count);
    return round_up(s.groups * s.rows * (s.vd + 2), 64 / int64_t(sizeof(C)));
  }

  // S[k][R]: scores of R rows (q: fp32, row stride qd) with K keys, R * K = sums_at_once; prefetches K rows at `ahead`
  template <int R>
  static ATTN_INLINE void dot_tile(const C* q, int64_t qd, const T* key, int64_t k_row, int64_t dim, C* S,
                                   const T* ahead, int64_t ahead_row) {
    constexpr int K = sums_at_once / R;
    V a[sums_at_once];
    ATTN_UNROLL for (int i = 0; i < sums_at_once; i++) a[i] = V::zero();
    const int64_t whole = dim / W * W;
    _Pragma("GCC unroll 2") for (int64_t d = 0; d < whole; d += W) {
      if (d % line == 0) ATTN_UNROLL for (int k = 0; k < K; k++) __builtin_prefetch(ahead + k * ahead_row + d);
      if constexpr (R <= K) {
        V y[R];
        ATTN_UNROLL for (int r = 0; r < R; r++) y[r] = load(q + r * qd + d);
        ATTN_UNROLL for (int k = 0; k < K; k++) {
          const V x = load(key + k * k_row + d);
          ATTN_UNROLL for (int r = 0; r < R; r++) a[k * R + r] = fma(y[r], x, a[k * R + r]);
        }
      } else {
        V x[K];
        ATTN_UNROLL for (int k = 0; k < K; k++) x[k] = load(key + k * k_row + d);
        ATTN_UNROLL for (int r = 0; r < R; r++) {
          const V y = load(q + r * qd + d);
          ATTN_UNROLL for (int k = 0; k < K; k++) a[k * R + r] = fma(y, x[k], a[k * R + r]);
        }
      }
    }
    if (whole < dim)
      for (int k = 0; k < K; k++) {
        const V x = load_part(key + k * k_row + whole, dim - whole);
        for (int r = 0; r < R; r++) a[k * R + r] = fma(load(q + r * qd + whole), x, a[k * R + r]);
      }
    ATTN_UNROLL for (int i = 0; i < sums_at_once; i += W) {
      V group[W];
      ATTN_UNROLL for (int j = 0; j < W; j++) group[j] = a[i + j];
      store(S + i, sums(group));
    }
  }

  template <int R>
  static ATTN_NOINLINE void scores(const C* q, int64_t qd, const T* key, int64_t k_row, int64_t dim, int64_t n, C* S,
                                   const T* ahead, int64_t ahead_row) {
    constexpr int K = sums_at_once / R;
    int64_t k = 0;
    for (; k + K <= n; k += K)
      dot_tile<R>(q, qd, key + k * k_row, k_row, dim, S + k * R, ahead + k * ahead_row, ahead_row);
    const int64_t whole = dim / W * W;
    for (; k < n; k++) {
      V a[R];
      ATTN_UNROLL for (int r = 0; r < R; r++) a[r] = V::zero();
      const T* x = key + k * k_row;
      for (int64_t d = 0; d < whole; d += W)
        ATTN_UNROLL for (int r = 0; r < R; r++) a[r] = fma(load(q + r * qd + d), load(x + d), a[r]);
      if (whole < dim) {
        const V tail = load_part(x + whole, dim - whole);
        ATTN_UNROLL for (int r = 0; r < R; r++) a[r] = fma(load(q + r * qd + whole), tail, a[r]);
      }
      ATTN_UNROLL for (int r = 0; r < R; r++) S[k * R + r] = sum(a[r]);
    }
  }

  // O[r][N vectors] += sum over n keys of P[k * ldp + r] value[k]; prefetches the same part of the rows at `ahead`
  template <int R, int N>
  static ATTN_INLINE void pv_block(const C* P, int64_t ldp, int64_t n, const T* value, int64_t v_row, C* O, int64_t ldo,
                                   const T* ahead, int64_t ahead_row) {
    V a[R][N];
    ATTN_UNROLL for (int r = 0; r < R; r++) ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = V::zero();
    _Pragma("GCC unroll 2") for (int64_t k = 0; k < n; k++, P += ldp, value += v_row, ahead += ahead_row) {
      if (ahead_row) ATTN_UNROLL for (int j = 0; j < N * W; j += line) __builtin_prefetch(ahead + j);
      V x[N];
      ATTN_UNROLL for (int j = 0; j < N; j++) x[j] = load(value + W * j);
      ATTN_UNROLL for (int r = 0; r < R; r++) {
        const V s = V::broadcast(P + r);
        ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = fma(s, x[j], a[r][j]);
      }
    }
    // added after the products: sums that start from the total would round every product at its size
    ATTN_UNROLL for (int r = 0; r < R; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
        store(O + r * ldo + W * j, load(O + r * ldo + W * j) + a[r][j]);
  }
  template <int R>
  static ATTN_INLINE void pv_tail(const C* P, int64_t ldp, int64_t n, const T* value, int64_t v_row, int64_t left, C* O,
                                  int64_t ldo) {
    V a[R];
    ATTN_UNROLL for (int r = 0; r < R; r++) a[r] = V::zero();
    for (int64_t k = 0; k < n; k++) {
      const V x = load_part(value + k * v_row, left);
      ATTN_UNROLL for (int r = 0; r < R; r++) a[r] = fma(V::broadcast(P + k * ldp + r), x, a[r]);
    }
    ATTN_UNROLL for (int r = 0; r < R; r++) store(O + r * ldo, load(O + r * ldo) + a[r]);
  }
  template <int R, int N>
  static ATTN_INLINE void pv_columns(int64_t& d, int64_t whole, const C* P, int64_t ldp, int64_t n, const T* value,
                                     int64_t v_row, C* O, int64_t ldo, const T* ahead, int64_t ahead_row) {
    for (; d + N * W <= whole; d += N * W)
      pv_block<R, N>(P, ldp, n, value + d, v_row, O + d, ldo, ahead + d, ahead_row);
    if constexpr (N > 1) pv_columns<R, N / 2>(d, whole, P, ldp, n, value, v_row, O, ldo, ahead, ahead_row);
  }
  template <int R>
  static ATTN_NOINLINE void weighted_values(const C* P, int64_t n, const T* value, int64_t v_row, int64_t dim, C* O,
                                            int64_t ldo, const T* ahead, int64_t ahead_row) {
    constexpr int M = R < pv_rows ? R : pv_rows, N = pv_tile / M < 8 ? pv_tile / M : 8;
    for (int r = 0; r < R; r += M) {
      int64_t d = 0;
      const int64_t whole = dim / W * W;
      pv_columns<M, N>(d, whole, P + r, R, n, value, v_row, O + r * ldo, ldo, ahead, r ? 0 : ahead_row);
      if (d < dim) pv_tail<M>(P + r, R, n, value + d, v_row, dim - d, O + r * ldo + d, ldo);
    }
  }
  // The same where a row may not see a value that is an inf or a NaN: a weight of exactly 0 hides it.
  static ATTN_NOINLINE void weighted_values_guarded(const C* P, int64_t rows, int64_t n, const T* value, int64_t v_row,
                                                    int64_t dim, C* O, int64_t ldo) {
    for (int64_t k = 0; k < n; k++)
      for (int64_t r = 0; r < rows; r++) {
        const C w = P[k * rows + r];
        if (w == C(0)) continue;
        for (int64_t d = 0; d < dim; d++) O[r * ldo + d] += w * load_one(value + k * v_row + d);
      }
  }
  // n a multiple of W
  static ATTN_INLINE bool finite(const C* x, int64_t n) {
    V bad = V::zero();  // 0 x is 0 for a finite x, else NaN
    for (int64_t i = 0; i < n; i += W) bad = fma(load(x + i), V::zero(), bad);
    return finite_bits(bad);
  }

  // Scores S[n][R] of keys k0 .. of the rows from `row` on -> weights; O, m, l brought to the new largest score.
  template <int R>
  static ATTN_NOINLINE void softmax(const DecodeParams& p, int64_t row, int64_t count, int64_t k0, int64_t n,
                                    bool border, C* S, const C* B, C* O, int64_t vd, C* m, C* l) {
    constexpr int period = R > W ? R : W, NV = period / W;  // lane i of a period is row i % R
    const int64_t total = n * R, end = round_up(total, period);
    const auto fill_hidden = [&](C x) {
      for (int64_t i = total; i < end; i++) S[i] = x;
      if (!border) return;
      for (int r = 0; r < R; r++) {
        if (r >= count) continue;  // a row that only fills the registers
        const int64_t t = (row + r) % p.q_len;
        const KeyRange seen = p.keys.any(t, t);
        const int64_t from = min_of(n, max_of(0, seen.begin - k0)), to = max_of(from, min_of(n, seen.end - k0));
        const int64_t shown = min_of(n, max_of(0, p.keys.prefix - k0));
        for (int64_t k = shown; k < from; k++) S[k * R + r] = x;
        for (int64_t k = max_of(shown, to); k < n; k++) S[k * R + r] = x;
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
    ATTN_UNROLL for (int v = 0; v < NV; v++) top[v] = V::zero();
    for (int64_t i = 0; i < end; i += period)
      ATTN_UNROLL for (int v = 0; v < NV; v++) top[v] = top[v] + load(S + i + v * W);
    ATTN_UNROLL for (int v = 0; v < NV; v++) store(t + v * W, top[v]);
    for (int i = 0; i < period; i++) l[i % R] += t[i];
  }

  static ATTN_INLINE void touch_pages(const void* rows, int64_t n) {
    for (int64_t i = 0; i < n; i += 4096 / int64_t(sizeof(T))) __builtin_prefetch(static_cast<const T*>(rows) + i);
  }

  template <int R>
  static void run_chunk(const DecodeParams& p, const DecodeRows& rows, const DecodeRun* runs, int64_t n_runs,
                        C* partial, C* space) {
    const Shape s(p, rows.count);
    C *const q = space, *const S = q + s.groups * R * s.qd;
    C *const O = partial, *const m = O + s.groups * R * s.vd, *const l = m + s.groups * R;
    C* const before = S + s.groups * s.score_size();  // one group's O
    C* const B = biased(p) ? before + R * s.vd : nullptr;
    const C factor = query_factor<C>(p);
    for (int64_t i = 0; i < s.groups * R; i++) {
      C* y = q + i * s.qd;
      int64_t d = 0;
      if (i < rows.count) {
        const int64_t at = rows.first + i;
        const T* x = static_cast<const T*>(rows.query) + at / p.q_len * p.q_head + at % p.q_len * p.q_row;
        for (; d < p.head_dim; d++) y[d] = load_one(x + d) * factor;
      }
      for (; d < s.qd; d++) y[d] = C(0);
      m[i] = lowest;
      l[i] = 0;
    }
    memset(O, 0, sizeof(C) * size_t(s.groups * R * s.vd));
    const KeyRange all = p.keys.all(0, p.q_len - 1);
    bool unseen[decode_row_block / max_rows];  // groups of which the mask hides every key of the block
    for (int64_t u = 0; u < n_runs; u++) {
      const DecodeRun& run = runs[u];
      if (u + 2 < n_runs) {  // blocks of a paged cache lie anywhere: their pages are looked up before their lines come
        touch_pages(runs[u + 2].key, runs[u + 2].count * p.k_row);
        touch_pages(runs[u + 2].value, runs[u + 2].count * p.v_row);
      }
      for (int64_t k0 = 0; k0 < run.count; k0 += s.keys) {
        const int64_t n = min_of(s.keys, run.count - k0), first = run.first + k0;
        const T* key = static_cast<const T*>(run.key) + k0 * p.k_row;
        const T* value = static_cast<const T*>(run.value) + k0 * p.v_row;
        const T* next =
            k0 + n < run.count ? key + n * p.k_row : static_cast<const T*>(u + 1 < n_runs ? runs[u + 1].key : run.key);
        const bool border = (first < all.begin || first + n > all.end) && first + n > p.keys.prefix;
        bool hides = border;
        for (int64_t g = 0; g < s.groups; g++) {
          C* w = S + g * s.score_size();
          const int64_t row = rows.first + g * R, count = rows.count - g * R;
          const MaskBlock mask = DecodeBias<T, R>::block(p, rows, row, count, first, n, B);
          unseen[g] = mask == MaskBlock::all_hidden;
          if (unseen[g]) continue;
          hides |= mask == MaskBlock::some_hidden;
          scores<R>(q + g * R * s.qd, s.qd, key, p.k_row, p.head_dim, n, w, value, p.v_row);
          softmax<R>(p, row, count, first, n, border, w, has_block(mask) ? B : nullptr, O + g * R * s.vd, s.vd,
                     m + g * R, l + g * R);
        }
        for (int64_t g = 0; g < s.groups; g++) {
          if (unseen[g]) continue;
          const C* w = S + g * s.score_size();
          C* o = O + g * R * s.vd;
          if (hides) memcpy(before, o, sizeof(C) * size_t(R * s.vd));
          weighted_values<R>(w, n, value, p.v_row, p.v_head_dim, o, s.vd, next, g ? 0 : p.k_row);
          if (hides && !finite(o, R * s.vd)) {
            memcpy(o, before, sizeof(C) * size_t(R * s.vd));
            weighted_values_guarded(w, R, n, value, p.v_row, p.v_head_dim, o, s.vd);
          }
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
    C* const first = static_cast<C*>(partials);
    for (int64_t i = 0; i < rows.count; i++) {
      const C* largest = first + all_rows * s.vd + i;
      const C* sums_of = largest + all_rows;
      C top = lowest, sum = 0;
      for (int64_t c = 0; c < chunks; c++) top = largest[c * size] > top ? largest[c * size] : top;
      C* o = first + i * s.vd;
      for (int64_t c = 0; c < chunks; c++) {
        const C w = sizeof(C) == 4 ? C(__builtin_exp2f(float(largest[c * size] - top)))
                                   : C(__builtin_exp2(double(largest[c * size] - top)));
        sum += w * sums_of[c * size];
        for (int64_t d = 0; d < s.vd; d += W) {
          const V x = load(o + c * size + d) * V::set(w);
          store(o + d, c ? load(o + d) + x : x);
        }
      }
      const double sink = rows.sinks ? rows.sinks[(rows.first + i) / p.q_len] : -__builtin_inf();
      C inverse = sum == C(0) ? C(0) : C(1) / sum, lse = natural_lse(top, sum);
      if (sink != -__builtin_inf()) add_sink(sink, top, sum, inverse, lse);
      const int64_t at = rows.first + i;
      T* out = static_cast<T*>(rows.out) + at * p.v_head_dim;
      for (int64_t d = 0; d < p.v_head_dim; d++) store_one(out + d, o[d] * inverse);
      static_cast<C*>(rows.lse)[at] = lse;
    }
  }
};

}  // namespace
}  // namespace attnjourney
