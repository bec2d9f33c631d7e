// Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236) in chunks: with S = sum phi(k) v^T over the keys
// before a chunk and Q, K, V its rows, out = (Q S + lower(Q K^T) V) / (Q z + rowsum lower(Q K^T) + eps).
//
// A block is a state in compute precision: S [head_dim][ld of v_head_dim], then z [head_dim], padded to vectors.
#pragma once
#include "cpu/kernels/attention/band.h"
#include "feature_map.h"

namespace attnjourney {
namespace {

template <class C>
struct LinearShape {
  static constexpr int W = Vec<C>::width;
  static constexpr int64_t chunk = Tuning::linear_chunk;
  static constexpr int64_t line = 64 / int64_t(sizeof(C));  // between rows of scratch: no collisions at powers of two
  static constexpr int64_t lanes_ld = chunk + line;         // of everything whose last dimension is the chunk's rows
  int64_t D, Dv, key_cols, value_cols, key_ld, value_ld;

  explicit LinearShape(const LinearParams& p)
      : D(p.head_dim),
        Dv(p.v_head_dim),
        key_cols(round_up(D, W)),
        value_cols(round_up(Dv, W)),
        key_ld(round_up(D, line) + line),
        value_ld(round_up(Dv, line) + line) {}
};

// sum += the rows of X
template <class C>
ATTN_NOINLINE void add_row_sums(const C* X, int64_t ld, int64_t rows, int64_t cols, C* sum, C* also) {
  constexpr int W = Vec<C>::width;
  for (int64_t d = 0; d < cols; d += W) {
    Vec<C> s = Vec<C>::zero();
    for (int64_t k = 0; k < rows; k++) s = s + load(X + k * ld + d);
    store(sum + d, load(sum + d) + s);
    if (also) store(also + d, load(also + d) + s);
  }
}

template <class T>
struct LinearForward {
  using C = Compute<T>;
  using Shape = LinearShape<C>;
  static constexpr int W = Shape::W;
  static constexpr int64_t chunk = Shape::chunk, lanes_ld = Shape::lanes_ld;

  // scratch, in numbers
  struct Space {
    int64_t key, value, query_t, scores, out, denominator, total;
    explicit Space(const LinearParams& p) {
      const Shape s(p);
      key = 0;
      value = key + chunk * s.key_ld;
      query_t = value + chunk * s.value_ld;
      scores = query_t + round_up(s.D * lanes_ld, Shape::line);
      out = scores + chunk * lanes_ld;
      denominator = out + chunk * s.value_ld;
      total = denominator + chunk;
    }
  };

  // phi(k) and v of rows first .. into scratch; tells whether v is finite
  static bool pack_keys(const LinearParams& p, const LinearHead& h, int64_t first, int64_t count, C* key, C* value,
                        bool* key_finite = nullptr) {
    const Shape s(p);
    const uint8_t* blocked = h.blocked ? h.blocked + first : nullptr;
    with_feature_map(p.feature_map, [&](auto m) {
      const Feature<m.map, C> f{C(1)};
      const bool finite = map_rows(static_cast<const T*>(h.key) + first * p.k_row, p.k_row, count, s.D, f, blocked, key,
                                   s.key_ld, s.key_cols);
      if (key_finite) *key_finite = finite;
    });
    return map_rows(static_cast<const T*>(h.value) + first * p.v_row, p.v_row, count, s.Dv, Unchanged{}, blocked, value,
                    s.value_ld, s.value_cols);
  }

  // block += sum over keys first .. first + count
  static void sum_keys(const LinearParams& p, const LinearHead& h, int64_t first, int64_t count, C* block, C* space) {
    const Shape s(p);
    const Space at(p);
    for (int64_t c = first; c < first + count; c += chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      pack_keys(p, h, c, n, space + at.key, space + at.value);
      Ahead ahead;
      next_keys(p, h, c + chunk, ahead);
      ahead.start(min_of(chunk, p.kv_len - c - chunk));
      add_keys(s, space + at.key, space + at.value, n, block, nullptr, &ahead);
    }
  }

  static void add_keys(const Shape& s, const C* key, const C* value, int64_t n, C* block, C* also, Ahead* ahead) {
    multiply<true>(key, s.key_ld, value, s.value_ld, n, s.D, s.value_cols, Band::full, true, block, s.value_cols, also,
                   ahead);
    const int64_t z = s.D * s.value_cols;
    add_row_sums(key, s.key_ld, n, s.key_cols, block + z, also ? also + z : nullptr);
  }

  // Rows first .. first + count of every query head of the group. Causal: `running`, the state before `first`, becomes
  // that after the last row, and what is added to it is also added to `also`. Else `running` is the state of all keys.
  static void run(const LinearParams& p, const LinearHead& h, int64_t first, int64_t count, C* running, C* also,
                  C* space) {
    const Shape s(p);
    const Space at(p);
    C *key = space + at.key, *value = space + at.value;
    for (int64_t c = first; c < first + count; c += chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      bool finite = true;
      if (p.causal) finite = pack_keys(p, h, c, n, key, value);
      Ahead ahead;
      for (int64_t g = 0; g < p.group; g++) {
        ahead = next_rows(p, h, g, c + chunk);
        head_chunk(p, s, at, h, g, c, n, finite, running, space, ahead);
      }
      if (p.causal) add_keys(s, key, value, n, running, also, &ahead);
    }
  }

  static void next_keys(const LinearParams& p, const LinearHead& h, int64_t next, Ahead& a) {
    a.add(static_cast<const T*>(h.key) + next * p.k_row, p.k_row, p.head_dim);
    a.add(static_cast<const T*>(h.value) + next * p.v_row, p.v_row, p.v_head_dim);
  }
  static Ahead next_rows(const LinearParams& p, const LinearHead& h, int64_t g, int64_t next) {
    Ahead a;
    a.add(static_cast<const T*>(h.query) + g * p.q_head + next * p.q_row, p.q_row, p.head_dim);
    a.add(static_cast<const T*>(h.out) + (g * p.q_len + next) * p.v_head_dim, p.v_head_dim, p.v_head_dim);
    if (p.causal && g == 0) next_keys(p, h, next, a);
    a.start(min_of(chunk, p.q_len - next));
    return a;
  }

  static void head_chunk(const LinearParams& p, const Shape& s, const Space& at, const LinearHead& h, int64_t g,
                         int64_t c, int64_t n, bool finite, const C* state, C* space, Ahead& ahead) {
    C *key = space + at.key, *query_t = space + at.query_t, *scores = space + at.scores, *out = space + at.out;
    C* denominator = space + at.denominator;
    const T* q = static_cast<const T*>(h.query) + g * p.q_head + c * p.q_row;
    with_feature_map(p.feature_map, [&](auto m) {
      pack_transposed(q, p.q_row, n, s.D, Feature<m.map, C>{C(p.scale)}, query_t, chunk, 0, lanes_ld);
    });
    const int64_t lanes = round_up(n, W);
    multiply<true>(query_t, lanes_ld, state, s.value_cols, s.D, n, s.value_cols, Band::full, false, out, s.value_ld,
                   static_cast<C*>(nullptr), &ahead);
    if (p.causal) {
      multiply<false>(key, s.key_ld, query_t, lanes_ld, s.D, n, lanes, Band::upper, false, scores, lanes_ld);
      clear_below_diagonal(scores, lanes_ld, n, lanes, static_cast<const C*>(nullptr));
      multiply_band<true>(scores, lanes_ld, space + at.value, s.value_ld, n, n, s.value_cols, Band::to_row, finite, out,
                          s.value_ld, &ahead);
    }
    T* o = static_cast<T*>(h.out) + (g * p.q_len + c) * s.Dv;
    if (!p.normalize) return unpack_rows(out, s.value_ld, n, s.Dv, C(1), o, s.Dv);
    const C* z = state + s.D * s.value_cols;
    for (int64_t i = 0; i < lanes; i += W) {
      Vec<C> sum = Vec<C>::zero(), own = Vec<C>::zero();
      for (int64_t d = 0; d < s.D; d++) sum = fma(load(query_t + d * lanes_ld + i), Vec<C>::broadcast(z + d), sum);
      if (p.causal)
        for (int64_t j = 0; j < min_of(n, i + W); j++) own = own + load(scores + j * lanes_ld + i);
      store(denominator + i, sum + own + Vec<C>::set(C(p.eps)));
    }
    C* saved = static_cast<C*>(h.denominator) + g * p.q_len + c;
    for (int64_t i = 0; i < n; i++) {
      saved[i] = denominator[i];
      divide_row(out + i * s.value_ld, s.Dv, denominator[i], o + i * s.Dv);
    }
  }

  // a denominator of 0 stands for a row that sees no key
  static ATTN_INLINE void divide_row(const C* x, int64_t cols, C by, T* y) {
    if (by == C(0)) {
      memset(static_cast<void*>(y), 0, size_t(cols) * sizeof(T));
      return;
    }
    const Vec<C> v = Vec<C>::set(by);
    int64_t d = 0;
    for (; d + W <= cols; d += W) store(y + d, load(x + d) / v);
    for (; d < cols; d++) store_one(y + d, x[d] / by);
  }
};

}  // namespace
}  // namespace attnjourney
