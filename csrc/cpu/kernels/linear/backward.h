// Backward of linear attention: two sweeps over the sequence that recompute their state, O(len) memory.
//
// With dN = dO / denominator, dm = -(dN . out) + the denominator's own gradient (0 without normalisation) and P =
// lower(dN V^T + dm):
//   forwards   dQ = P K + dN S^T + dm z, S^T and z over the keys before the chunk
//   backwards  dK = P^T Q + V T^T + t, dV = lower(Q K^T)^T dN + K T, T = sum q dN^T and t = sum dm q over the rows
//   after
// T and t begin with the gradient of the state that the forward returned and end as that of the one it was given.
//
// Two more kinds of block: S^T [v_head_dim][ld of head_dim], z [head_dim]; T, t as S, z in linear_attention.h.
#pragma once
#include "forward.h"

namespace attnjourney {
namespace {

// Products computed as they are written.
struct PlainProducts {
  static constexpr int64_t space(const LinearParams&) { return 0; }
  template <bool columns, class C>
  static ATTN_INLINE void multiply(const C* A, int64_t lda, const C* B, int64_t ldb, int64_t n, int64_t rows,
                                   int64_t cols, Band band, bool add, C* out, int64_t ldo, C* also, Ahead* ahead, C*) {
    attnjourney::multiply<columns>(A, lda, B, ldb, n, rows, cols, band, add, out, ldo, also, ahead);
  }
};

template <class T, class Products = PlainProducts>
struct LinearBackward {
  using C = Compute<T>;
  using Shape = LinearShape<C>;
  using Forward = LinearForward<T>;
  static constexpr int W = Shape::W;
  static constexpr int64_t chunk = Shape::chunk, lanes_ld = Shape::lanes_ld;

  // scratch, in numbers
  struct Space {
    int64_t key, value, query, grad, query_t, grad_t, scores, weights, grad_key, grad_value, state_t, minus, packs;
    int64_t total;
    explicit Space(const LinearParams& p) {
      const Shape s(p);
      key = 0;
      value = key + chunk * s.key_ld;
      query = value + chunk * s.value_ld;
      grad = query + chunk * s.key_ld;
      query_t = grad + chunk * s.value_ld;
      grad_t = query_t + round_up(s.D, W) * lanes_ld;
      scores = grad_t + round_up(s.Dv, W) * lanes_ld;
      weights = scores + chunk * lanes_ld;
      grad_key = weights + chunk * lanes_ld;  // dQ in the forward sweep
      grad_value = grad_key + chunk * s.key_ld;
      state_t = grad_value + chunk * s.value_ld;
      minus = state_t + round_up(round_up(s.Dv, W) * s.key_ld, Shape::line);
      packs = minus + chunk;
      total = packs + Products::space(p);
    }
  };

  // multiply and multiply_band of band.h
  template <bool columns>
  static ATTN_INLINE void multiply(const Space& at, C* space, const C* A, int64_t lda, const C* B, int64_t ldb,
                                   int64_t n, int64_t rows, int64_t cols, Band band, bool add, C* out, int64_t ldo,
                                   C* also = nullptr, Ahead* ahead = nullptr) {
    Products::template multiply<columns>(A, lda, B, ldb, n, rows, cols, band, add, out, ldo, also, ahead,
                                         space + at.packs);
  }
  template <bool columns>
  static ATTN_INLINE void multiply_band(const Space& at, C* space, const C* A, int64_t lda, const C* B, int64_t ldb,
                                        int64_t n, int64_t rows, int64_t cols, Band band, bool finite, C* out,
                                        int64_t ldo, Ahead* ahead = nullptr) {
    if (finite)
      multiply<columns>(at, space, A, lda, B, ldb, n, rows, cols, band, true, out, ldo, nullptr, ahead);
    else
      multiply_guarded<columns>(A, lda, B, ldb, n, rows, cols, band, out, ldo);
  }

  // dN of n rows from row c of query head g, row-major; dm into `minus`; tells whether dN is finite
  static bool pack_grad(const LinearParams& p, const Shape& s, const Space& at, const LinearHead& h, int64_t g,
                        int64_t c, int64_t n, C* space) {
    const T* x = static_cast<const T*>(h.grad_out) + g * p.grad_out_head + c * p.grad_out_row;
    C *grad = space + at.grad, *minus = space + at.minus;
    bool finite = map_rows(x, p.grad_out_row, n, s.Dv, Unchanged{}, nullptr, grad, s.value_ld, s.value_cols);
    memset(minus, 0, size_t(chunk) * sizeof(C));
    if (!p.normalize) return finite;
    const C* denominator = static_cast<const C*>(h.denominator) + g * p.q_len + c;
    const C* given = static_cast<const C*>(h.grad_denominator);
    const T* out = static_cast<const T*>(h.out) + (g * p.q_len + c) * s.Dv;
    for (int64_t i = 0; i < n; i++) {
      C* row = grad + i * s.value_ld;
      const C r = denominator[i] == C(0) ? C(0) : C(1) / denominator[i];
      Vec<C> sum_v = Vec<C>::zero();
      int64_t d = 0;
      for (; d + W <= s.Dv; d += W) {
        const Vec<C> v = load(row + d) * Vec<C>::set(r);
        store(row + d, v);
        sum_v = fma(v, load(out + i * s.Dv + d), sum_v);
      }
      C m = sum(sum_v);
      for (; d < s.Dv; d++) {
        row[d] *= r;
        m += row[d] * C(load_one(out + i * s.Dv + d));
      }
      if (given) m -= given[g * p.q_len + c + i];
      minus[i] = -m;
      finite = finite && m - m == C(0);
    }
    return finite;
  }

  // block (T, t) += sum over rows first .. first + count of all query heads
  static void sum_queries(const LinearParams& p, const LinearHead& h, int64_t first, int64_t count, C* block,
                          C* space) {
    const Shape s(p);
    const Space at(p);
    for (int64_t c = last_chunk(first, count); c >= first; c -= chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      for (int64_t g = 0; g < p.group; g++) {
        pack_grad(p, s, at, h, g, c, n, space);
        pack_query(p, s, at, h, g, c, n, space);
        Ahead ahead = rows_around(p, h, g, c - chunk, false);
        add_queries(s, at, n, block, nullptr, space, ahead);
      }
    }
  }

  static int64_t last_chunk(int64_t first, int64_t count) { return first + (count - 1) / chunk * chunk; }

  static bool pack_query(const LinearParams& p, const Shape& s, const Space& at, const LinearHead& h, int64_t g,
                         int64_t c, int64_t n, C* space) {
    bool finite = true;
    const T* q = static_cast<const T*>(h.query) + g * p.q_head + c * p.q_row;
    with_feature_map(p.feature_map, [&](auto m) {
      finite =
          map_rows(q, p.q_row, n, s.D, Feature<m.map, C>{C(p.scale)}, nullptr, space + at.query, s.key_ld, s.key_cols);
    });
    return finite;
  }

  static void add_queries(const Shape& s, const Space& at, int64_t n, C* block, C* also, C* space, Ahead& ahead) {
    const C *query = space + at.query, *minus = space + at.minus;
    multiply<true>(at, space, query, s.key_ld, space + at.grad, s.value_ld, n, s.D, s.value_cols, Band::full, true,
                   block, s.value_cols, also, &ahead);
    const int64_t z = s.D * s.value_cols;
    for (int64_t d = 0; d < s.key_cols; d += W) {
      Vec<C> t = Vec<C>::zero();
      for (int64_t i = 0; i < n; i++) t = fma(load(query + i * s.key_ld + d), Vec<C>::broadcast(minus + i), t);
      store(block + z + d, load(block + z + d) + t);
      if (also) store(also + z + d, load(also + z + d) + t);
    }
  }

  // block (S^T, z) += sum over keys first .. first + count
  static void sum_keys(const LinearParams& p, const LinearHead& h, int64_t first, int64_t count, C* block, C* space) {
    const Shape s(p);
    const Space at(p);
    for (int64_t c = first; c < first + count; c += chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      Forward::pack_keys(p, h, c, n, space + at.key, space + at.value);
      Ahead ahead;
      Forward::next_keys(p, h, c + chunk, ahead);
      ahead.start(min_of(chunk, p.kv_len - c - chunk));
      add_keys(s, at, n, block, nullptr, space, ahead);
    }
  }

  // what a sweep takes of query head g in rows `next` ..; `next` may be outside
  static Ahead rows_around(const LinearParams& p, const LinearHead& h, int64_t g, int64_t next, bool keys) {
    Ahead a;
    a.add(static_cast<const T*>(h.query) + g * p.q_head + next * p.q_row, p.q_row, p.head_dim);
    a.add(static_cast<const T*>(h.grad_out) + g * p.grad_out_head + next * p.grad_out_row, p.grad_out_row,
          p.v_head_dim);
    if (p.normalize)
      a.add(static_cast<const T*>(h.out) + (g * p.q_len + next) * p.v_head_dim, p.v_head_dim, p.v_head_dim);
    if (keys && g == 0) Forward::next_keys(p, h, next, a);
    if (next >= 0) a.start(min_of(chunk, p.q_len - next));
    return a;
  }

  static void add_keys(const Shape& s, const Space& at, int64_t n, C* block, C* also, C* space, Ahead& ahead) {
    multiply<true>(at, space, space + at.value, s.value_ld, space + at.key, s.key_ld, n, s.Dv, s.key_cols, Band::full,
                   true, block, s.key_cols, also, &ahead);
    const int64_t z = s.Dv * s.key_cols;
    add_row_sums(space + at.key, s.key_ld, n, s.key_cols, block + z, also ? also + z : nullptr);
  }

  // P^T [key][row] of the chunk, and dN^T
  static void weights(const Shape& s, const Space& at, int64_t n, C* space, Ahead& ahead) {
    const int64_t lanes = round_up(n, W);
    multiply<false>(at, space, space + at.value, s.value_ld, space + at.grad_t, lanes_ld, s.Dv, n, lanes, Band::upper,
                    false, space + at.weights, lanes_ld, nullptr, &ahead);
    clear_below_diagonal(space + at.weights, lanes_ld, n, lanes, static_cast<const C*>(space + at.minus));
  }
  static void transpose_grad(const Shape& s, const Space& at, int64_t n, C* space) {
    pack_transposed(static_cast<const C*>(space + at.grad), s.value_ld, n, s.Dv, Unchanged{}, space + at.grad_t, chunk,
                    0, lanes_ld);
  }

  // The forward sweep: grad_query of rows first .. first + count. Causal: `running` (S^T, z before `first`) moves on,
  // as in LinearForward::run; else it is that of all keys.
  static void query_sweep(const LinearParams& p, const LinearHead& h, int64_t first, int64_t count, C* running, C* also,
                          C* space) {
    const Shape s(p);
    const Space at(p);
    C* const out = space + at.grad_key;
    const C* const z = running + s.Dv * s.key_cols;
    for (int64_t c = first; c < first + count; c += chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      bool key_finite = true;
      if (p.causal) Forward::pack_keys(p, h, c, n, space + at.key, space + at.value, &key_finite);
      Ahead ahead;
      for (int64_t g = 0; g < p.group; g++) {
        ahead = rows_around(p, h, g, c + chunk, p.causal);
        pack_grad(p, s, at, h, g, c, n, space);
        transpose_grad(s, at, n, space);
        multiply<true>(at, space, space + at.grad_t, lanes_ld, running, s.key_cols, s.Dv, n, s.key_cols, Band::full,
                       false, out, s.key_ld, nullptr, &ahead);
        for (int64_t i = 0; i < n; i++) {
          const Vec<C> m = Vec<C>::broadcast(space + at.minus + i);
          for (int64_t d = 0; d < s.key_cols; d += W)
            store(out + i * s.key_ld + d, fma(m, load(z + d), load(out + i * s.key_ld + d)));
        }
        if (p.causal) {
          weights(s, at, n, space, ahead);
          multiply_band<true>(at, space, space + at.weights, lanes_ld, space + at.key, s.key_ld, n, n, s.key_cols,
                              Band::to_row, key_finite, out, s.key_ld, &ahead);
        }
        const T* q = static_cast<const T*>(h.query) + g * p.q_head + c * p.q_row;
        with_feature_map(p.feature_map, [&](auto m) {
          scale_by_slope(out, s.key_ld, q, p.q_row, n, s.D, FeatureSlope<m.map, C>{C(p.scale)}, nullptr,
                         static_cast<T*>(h.grad_query) + (g * p.q_len + c) * s.D);
        });
      }
      if (p.causal) add_keys(s, at, n, running, also, space, ahead);
    }
  }

  // The backward sweep: grad_key and grad_value of rows first .. first + count, both wanted or not at all. Causal:
  // `running` (T, t after the last row) moves to that before `first`; else it is that of all rows.
  static void key_sweep(const LinearParams& p, const LinearHead& h, int64_t first, int64_t count, C* running, C* also,
                        C* space) {
    const Shape s(p);
    const Space at(p);
    C *const gk = space + at.grad_key, *const gv = space + at.grad_value, *const state_t = space + at.state_t;
    const C* const t = running + s.D * s.value_cols;
    const bool wanted = h.grad_key != nullptr;
    for (int64_t c = last_chunk(first, count); c >= first; c -= chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      if (wanted) {
        Forward::pack_keys(p, h, c, n, space + at.key, space + at.value);
        transpose_state(s, running, state_t);
        multiply<false>(at, space, space + at.value, s.value_ld, state_t, s.key_ld, s.Dv, n, s.key_cols, Band::full,
                        false, gk, s.key_ld);
        for (int64_t j = 0; j < n; j++)
          for (int64_t d = 0; d < s.key_cols; d += W)
            store(gk + j * s.key_ld + d, load(gk + j * s.key_ld + d) + load(t + d));
        multiply<false>(at, space, space + at.key, s.key_ld, running, s.value_cols, s.D, n, s.value_cols, Band::full,
                        false, gv, s.value_ld);
      }
      if (p.causal)
        for (int64_t g = 0; g < p.group; g++) {
          const bool grad_finite = pack_grad(p, s, at, h, g, c, n, space);
          const bool query_finite = pack_query(p, s, at, h, g, c, n, space);
          Ahead ahead = rows_around(p, h, g, c - chunk, wanted);
          if (wanted) own_chunk(s, at, n, query_finite, grad_finite, space, ahead);
          add_queries(s, at, n, running, also, space, ahead);
        }
      if (wanted) write_keys(p, s, h, c, n, space + at.key, gk, gv);
    }
  }

  // what the rows of a chunk give to its own keys
  static void own_chunk(const Shape& s, const Space& at, int64_t n, bool query_finite, bool grad_finite, C* space,
                        Ahead& ahead) {
    const int64_t lanes = round_up(n, W);
    pack_transposed(static_cast<const C*>(space + at.query), s.key_ld, n, s.D, Unchanged{}, space + at.query_t, chunk,
                    0, lanes_ld);
    transpose_grad(s, at, n, space);
    multiply<false>(at, space, space + at.key, s.key_ld, space + at.query_t, lanes_ld, s.D, n, lanes, Band::upper,
                    false, space + at.scores, lanes_ld);
    clear_below_diagonal(space + at.scores, lanes_ld, n, lanes, static_cast<const C*>(nullptr));
    weights(s, at, n, space, ahead);
    multiply_band<false>(at, space, space + at.weights, lanes_ld, space + at.query, s.key_ld, n, n, s.key_cols,
                         Band::from_row, query_finite, space + at.grad_key, s.key_ld, &ahead);
    multiply_band<false>(at, space, space + at.scores, lanes_ld, space + at.grad, s.value_ld, n, n, s.value_cols,
                         Band::from_row, grad_finite, space + at.grad_value, s.value_ld);
  }

  // T [D][value_cols] -> T^T [Dv][key_ld], columns past D 0
  static void transpose_state(const Shape& s, const C* state, C* out) {
    pack_transposed(state, s.value_cols, s.D, s.Dv, Unchanged{}, out, s.key_cols, 0, s.key_ld);
  }

  // key: phi of the keys
  static void write_keys(const LinearParams& p, const Shape& s, const LinearHead& h, int64_t c, int64_t n, const C* key,
                         const C* gk, const C* gv) {
    const uint8_t* blocked = h.blocked ? h.blocked + c : nullptr;
    with_feature_map(p.feature_map, [&](auto m) {
      scale_by_slope(gk, s.key_ld, key, s.key_ld, n, s.D, SlopeOfFeature<m.map, C>{}, blocked,
                     static_cast<T*>(h.grad_key) + c * s.D);
    });
    T* v = static_cast<T*>(h.grad_value) + c * s.Dv;
    unpack_rows(gv, s.value_ld, n, s.Dv, C(1), v, s.Dv);
    for (int64_t j = 0; blocked && j < n; j++)
      if (blocked[j]) memset(static_cast<void*>(v + j * s.Dv), 0, size_t(s.Dv) * sizeof(T));
  }
};

}  // namespace
}  // namespace attnjourney
