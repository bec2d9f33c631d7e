// Gradients of token-sparse attention, some rows at a time (of query, or heads of one row) that see the same keys.
//
// `rows`: the keys and values are gathered into one piece; S = Q K^T and dP = dO V^T, all of them, [pass][key][row];
// the softmax is made again from these scores, so that the weights are those of their own sum; dS; dQ = dS K. It leaves
// the weights, dS, and the rows of Q and dO in compute precision. `add_keys`: for a range of keys, dK += dS^T Q and dV
// += P^T dO, tiles of M keys by N vectors, scattered. Ranges of one call do not share keys, calls come in the order of
// the rows: no sum depends on the number of threads.
#pragma once
#include "cpu/kernels/common/exp2.h"
#include "cpu/kernels/common/score_modifier.h"
#include "cpu/sparse/kernels.h"
#include "gather.h"
#include "row_passes.h"

namespace attnjourney {
namespace {

template <class T>
struct SparseBackward {
  using Real = Compute<T>;
  using V = Vec<Real>;
  using Products = PassProducts<T>;
  static constexpr int width = V::width;
  static constexpr Real infinity = Real(__builtin_inff());
  static constexpr Real lowest = sizeof(Real) == 4 ? Real(-3.4028234663852886e38) : Real(-1.7976931348623157e308);

  struct Shape {
    Passes passes;
    int64_t n, qd, vd, stride;  // keys; padded dimensions; numbers of a pass
    Shape(const SparseKernelParams& params, int64_t count, int64_t n) : passes(count), n(n) {
      qd = round_up(params.head_dim, width), vd = round_up(params.v_head_dim, width);
      stride = Products::padded(passes, n);
    }
  };
  // what `rows` leaves
  struct Saved {
    Real *weights, *grad_scores;  // [pass][key][row]
    Real *query, *grad_out;       // [row][padded], query times the scale
    bool* finite;                 // whether these two are
    Saved(const Shape& s, Scratch& scratch) {
      weights = scratch.take<Real>(s.passes.count * s.stride);
      grad_scores = scratch.take<Real>(s.passes.count * s.stride);
      query = scratch.take<Real>(s.passes.all() * s.qd);
      grad_out = scratch.take<Real>(s.passes.all() * s.vd);
      finite = scratch.take<bool>(1);
    }
  };
  struct Buffers {
    T *key, *value;    // [n][dim]; null: the values are a part of the keys
    Real* states;      // of one pass
    Real* grad_query;  // [row][qd]
    Buffers(const SparseKernelParams& params, const Shape& s, Scratch& scratch) {
      key = scratch.take<T>(s.n * params.head_dim);
      value = scratch.take<T>(s.n * params.v_head_dim);
      states = scratch.take<Real>(s.stride);
      grad_query = scratch.take<Real>(s.passes.all() * s.qd);
    }
  };
  static int64_t saved_space(const SparseKernelParams& params, int64_t count, int64_t n) {
    return scratch_bytes<Saved>(Shape(params, count, n));
  }
  static int64_t rows_space(const SparseKernelParams& params, int64_t count, int64_t n) {
    return scratch_bytes<Buffers>(params, Shape(params, count, n));
  }

  // grad_sinks[count]: of the rows
  static void rows(const SparseKernelParams& params, const SparseRows& in, void* saved_, double* grad_sinks,
                   void* space) {
    const Shape s(params, in.count, in.n);
    const Saved saved = buffers_in<Saved>(saved_, s);
    const Buffers b = buffers_in<Buffers>(space, params, s);
    const T *const key = static_cast<const T*>(in.key), *const value = static_cast<const T*>(in.value);
    constexpr int64_t size = sizeof(T);
    gather_rows(key, params.k_row * size, params.head_dim * size, in.keys, in.n, b.key);
    const bool inside =
        params.k_row == params.v_row && value >= key && value + params.v_head_dim <= key + params.head_dim;
    if (!inside) gather_rows(value, params.v_row * size, params.v_head_dim * size, in.keys, in.n, b.value);
    const T* const values = inside ? b.key + (value - key) : b.value;
    const int64_t value_row = inside ? params.head_dim : params.v_head_dim;

    bool finite =
        copy_rows(in, in.query, params.q_head, params.q_row, params.head_dim, s, s.qd, Real(params.scale), saved.query);
    finite &= copy_rows(in, in.grad_out, params.grad_out_head, params.grad_out_row, params.v_head_dim, s, s.vd, Real(1),
                        saved.grad_out);
    *saved.finite = finite;
    Products::dots(s.passes, saved.query, s.qd, b.key, params.head_dim, params.head_dim, in.n, saved.weights, s.stride);
    Products::dots(s.passes, saved.grad_out, s.vd, values, value_row, params.v_head_dim, in.n, saved.grad_scores,
                   s.stride);
    for (int64_t i = 0; i < s.passes.count; i++)
      s.passes.with([&](auto r) {
        softmax<r.count>(params, in, i * r.count, saved.weights + i * s.stride, saved.grad_scores + i * s.stride,
                         b.states, grad_sinks + i * r.count);
      });
    if (!in.grad_query) return;
    memset(b.grad_query, 0, size_t(s.passes.all() * s.qd) * sizeof(Real));
    const int64_t some = in.n - in.whole;
    Products::sums(s.passes, saved.grad_scores, s.stride, b.key, params.head_dim, params.head_dim, in.whole, false,
                   b.grad_query, s.qd);
    if (some) {
      const T* const last = b.key + in.whole * params.head_dim;
      const bool guarded = !all_finite(static_cast<const T*>(last), params.head_dim, some, params.head_dim);
      Products::sums(s.passes, saved.grad_scores + in.whole * s.passes.rows, s.stride, last, params.head_dim,
                     params.head_dim, some, guarded, b.grad_query, s.qd);
    }
    for (int64_t i = 0; i < in.count; i++) {
      const int64_t at = in.first + i;
      T* const to =
          static_cast<T*>(in.grad_query) + at / in.rows * params.grad_q_head + at % in.rows * params.grad_q_row;
      unpack_rows(static_cast<const Real*>(b.grad_query) + i * s.qd, s.qd, 1, params.head_dim, Real(params.scale), to,
                  params.head_dim);
    }
  }

  // adds to the sums [kv_len][padded] of the keys of number [begin, end); null: not wanted
  static void add_keys(const SparseKernelParams& params, const SparseRows& in, const void* saved_, int64_t begin,
                       int64_t end, void* grad_key, void* grad_value) {
    const Shape s(params, in.count, in.n);
    const Saved saved = buffers_in<Saved>(const_cast<void*>(saved_), s);
    const auto add = [&](int64_t from, int64_t to, bool guarded) {
      if (from >= to) return;
      const auto function = guarded ? KeySums<Real>::add_guarded_rows : KeySums<Real>::add;
      if (grad_key)
        function(s.passes, saved.grad_scores, s.stride, saved.query, s.qd, s.qd, in.keys, from, to,
                 static_cast<Real*>(grad_key));
      if (grad_value)
        function(s.passes, saved.weights, s.stride, saved.grad_out, s.vd, s.vd, in.keys, from, to,
                 static_cast<Real*>(grad_value));
    };
    add(begin, min_of(end, in.whole), false);
    add(max_of(begin, in.whole), end, !*saved.finite);
  }

  static void write(const void* sums, int64_t rows, int64_t cols, void* to, int64_t to_row) {
    unpack_rows(static_cast<const Real*>(sums), round_up(cols, width), rows, cols, Real(1), static_cast<T*>(to),
                to_row);
  }

  // ---- for the indexer's loss, too (indexer_loss.h) ----

  // rows times a factor, padded with zeros, those past the last one 0; whether all numbers are finite
  static bool copy_rows(const SparseRows& in, const void* from_, int64_t head, int64_t row, int64_t dim, const Shape& s,
                        int64_t ld, Real factor, Real* to) {
    bool finite = true;
    for (int64_t i = 0; i < s.passes.all(); i++, to += ld) {
      if (i >= in.count) {
        memset(to, 0, size_t(ld) * sizeof(Real));
        continue;
      }
      const int64_t at = in.first + i;
      const T* const from = static_cast<const T*>(from_) + at / in.rows * head + at % in.rows * row;
      finite &= pack_rows(from, dim, 1, dim, to, ld, ld);
      if (factor == Real(1)) continue;
      for (int64_t d = 0; d < ld; d += width) store(to + d, load(to + d) * V::set(factor));
    }
    return finite;
  }

  // Products -> weights and dS, of the R rows of a pass from row `first` of the call on
  template <int R>
  static ATTN_NOINLINE void softmax(const SparseKernelParams& params, const SparseRows& in, int64_t first, Real* scores,
                                    Real* grads, Real* states, double* grad_sinks) {
    constexpr int period = R > width ? R : width, vectors = period / width;  // lane i of a period is row i % R
    const int64_t total = in.n * R, end = round_up(total, period), count = min_of(R, in.count - first);
    const auto each = [&](auto&& f) {  // f(vector of a period, its place)
      for (int64_t i = 0; i < end; i += period) ATTN_UNROLL for (int v = 0; v < vectors; v++) f(v, i + v * width);
    };
    const auto hide = [&](Real* x, Real with) {
      for (int64_t i = total; i < end; i++) x[i] = with;
      for (int64_t j = in.whole; j < in.n; j++)
        for (int r = 0; r < count; r++)
          if (in.keys[j] > in.last + (in.first + first + r) % in.rows) x[j * R + r] = with;
    };
    const auto of_rows = [&](const V(&lanes)[vectors], auto&& f) {  // f(row, number) of every lane
      Real numbers[period];
      ATTN_UNROLL for (int v = 0; v < vectors; v++) store(numbers + v * width, lanes[v]);
      for (int i = 0; i < period; i++) f(i % R, numbers[i]);
    };
    // a number of each row in its lanes
    const auto spread = [&](const Real(&of_row)[R], V(&lanes)[vectors]) {
      Real numbers[period];
      for (int i = 0; i < period; i++) numbers[i] = of_row[i % R];
      ATTN_UNROLL for (int v = 0; v < vectors; v++) lanes[v] = load(numbers + v * width);
    };

    const bool modified = params.modifier.on();
    const V factor = V::set(Real(modified ? 2 * log2_e / params.modifier.softcap : log2_e));
    each([&](int, int64_t at) { store(scores + at, load(scores + at) * factor); });
    if (modified) {
      struct {
        ScoreModifier modifier;
        MaskKind mask = MaskKind::none;
      } const unit{params.modifier};
      modify_scores(scores, int(end / width), Modifier<Real>(unit), states);
    }
    hide(scores, -infinity);
    hide(grads, Real(0));
    V lanes[vectors], also[vectors];
    ATTN_UNROLL for (int v = 0; v < vectors; v++) lanes[v] = V::set(lowest);
    each([&](int v, int64_t at) { lanes[v] = max(load(scores + at), lanes[v]); });
    Real top[R], sum[R] = {}, delta[R] = {}, inverse[R], shift[R];
    double sink[R], of_sink[R];
    for (int r = 0; r < R; r++) {
      sink[r] = in.sinks && r < count ? in.sinks[(in.first + first + r) / in.rows] * log2_e : -__builtin_inf();
      if (sink[r] > -double(lowest)) sink[r] = -double(lowest);
      top[r] = sink[r] > double(lowest) ? Real(sink[r]) : lowest;
    }
    of_rows(lanes, [&](int r, Real x) { top[r] = x > top[r] ? x : top[r]; });
    spread(top, lanes);
    each([&](int v, int64_t at) { store(scores + at, exp2(load(scores + at) - lanes[v])); });
    hide(scores, Real(0));
    ATTN_UNROLL for (int v = 0; v < vectors; v++) lanes[v] = also[v] = V::zero();
    each([&](int v, int64_t at) {
      const V weight = load(scores + at);
      lanes[v] = lanes[v] + weight;
      also[v] = fma(weight, load(grads + at), also[v]);
    });
    of_rows(lanes, [&](int r, Real x) { sum[r] += x; });
    of_rows(also, [&](int r, Real x) { delta[r] += x; });
    for (int r = 0; r < R; r++) {
      of_sink[r] = __builtin_exp2(sink[r] - double(top[r]));
      const Real whole = Real(double(sum[r]) + of_sink[r]);
      inverse[r] = r < count && whole != Real(0) ? Real(1) / whole : Real(0);
      delta[r] *= inverse[r];
      const int64_t at = in.first + first + r;
      const Real grad_lse = in.grad_lse && r < count
                                ? static_cast<const Real*>(in.grad_lse)[at / in.rows * params.q_len + at % in.rows]
                                : Real(0);
      shift[r] = grad_lse - delta[r];
      if (r < count) grad_sinks[r] = of_sink[r] * double(inverse[r]) * double(shift[r]);
    }
    V shifts[vectors];
    spread(inverse, lanes);
    spread(shift, shifts);
    const V one = V::set(Real(1));
    each([&](int v, int64_t at) {
      const V weight = load(scores + at) * lanes[v];
      V grad = weight * (load(grads + at) + shifts[v]);
      if (modified) {
        const V state = load(states + at);
        grad = grad * (one - state * state);
      }
      store(scores + at, weight);
      store(grads + at, grad);
    });
    hide(grads, Real(0));
    for (int64_t r = count; r < R; r++)  // rows that only fill the registers
      for (int64_t j = 0; j < in.n; j++) scores[j * R + r] = grads[j * R + r] = Real(0);
    hide(scores, Real(0));
  }
};

}  // namespace
}  // namespace attnjourney
