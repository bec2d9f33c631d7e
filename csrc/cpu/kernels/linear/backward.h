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
struct ChunkProducts {
  struct Buffers {
    Buffers() = default;
    Buffers(const LinearParams&, Scratch&) {}
  };
  template <bool columns, class Real>
  static ATTN_INLINE void multiply(const Real* left, int64_t left_ld, const Real* right, int64_t right_ld, int64_t n,
                                   int64_t rows, int64_t cols, Band band, bool add, Real* out, int64_t out_ld,
                                   Real* also, RowPrefetch* prefetch, const Buffers&) {
    attnjourney::multiply<columns>(left, left_ld, right, right_ld, n, rows, cols, band, add, out, out_ld, also,
                                   prefetch);
  }
};

template <class T, class Products = ChunkProducts>
struct LinearBackward {
  using Real = Compute<T>;
  using Shape = LinearShape<Real>;
  using Forward = LinearForward<T>;
  static constexpr int width = Shape::width;
  static constexpr int64_t chunk = Shape::chunk, lanes_ld = Shape::lanes_ld;

  struct Buffers {
    Real *key, *value, *query, *grad;  // [chunk][ld], rows
    Real *query_t, *grad_t;            // [dim][lanes_ld]
    Real *scores, *weights;            // [chunk][lanes_ld]
    Real *grad_key, *grad_value;       // [chunk][ld]; the first is dQ in the forward sweep
    Real* state_t;                     // [v_head_dim][key_ld]
    Real* minus;                       // [chunk]: dm
    typename Products::Buffers packs;
    Buffers(const LinearParams& params, Scratch& scratch) {
      const Shape shape(params);
      key = scratch.take<Real>(chunk * shape.key_ld);
      value = scratch.take<Real>(chunk * shape.value_ld);
      query = scratch.take<Real>(chunk * shape.key_ld);
      grad = scratch.take<Real>(chunk * shape.value_ld);
      query_t = scratch.take<Real>(round_up(shape.D, width) * lanes_ld);
      grad_t = scratch.take<Real>(round_up(shape.Dv, width) * lanes_ld);
      scores = scratch.take<Real>(chunk * lanes_ld);
      weights = scratch.take<Real>(chunk * lanes_ld);
      grad_key = scratch.take<Real>(chunk * shape.key_ld);
      grad_value = scratch.take<Real>(chunk * shape.value_ld);
      state_t = scratch.take<Real>(round_up(shape.Dv, width) * shape.key_ld);
      minus = scratch.take<Real>(chunk);
      packs = typename Products::Buffers(params, scratch);
    }
  };
  static int64_t space(const LinearParams& params) { return scratch_bytes<Buffers>(params); }

  // multiply and multiply_band of band.h
  template <bool columns>
  static ATTN_INLINE void multiply(const Buffers& buffers, const Real* left, int64_t left_ld, const Real* right,
                                   int64_t right_ld, int64_t n, int64_t rows, int64_t cols, Band band, bool add,
                                   Real* out, int64_t out_ld, Real* also = nullptr, RowPrefetch* prefetch = nullptr) {
    Products::template multiply<columns>(left, left_ld, right, right_ld, n, rows, cols, band, add, out, out_ld, also,
                                         prefetch, buffers.packs);
  }
  template <bool columns>
  static ATTN_INLINE void multiply_band(const Buffers& buffers, const Real* left, int64_t left_ld, const Real* right,
                                        int64_t right_ld, int64_t n, int64_t rows, int64_t cols, Band band, bool finite,
                                        Real* out, int64_t out_ld, RowPrefetch* prefetch = nullptr) {
    if (finite)
      multiply<columns>(buffers, left, left_ld, right, right_ld, n, rows, cols, band, true, out, out_ld, nullptr,
                        prefetch);
    else
      multiply_guarded<columns>(left, left_ld, right, right_ld, n, rows, cols, band, out, out_ld);
  }

  // dN of n rows from row c of query head g, row-major; dm into `minus`; tells whether dN is finite
  static bool pack_grad(const LinearParams& params, const Shape& shape, const Buffers& buffers, const LinearHead& head,
                        int64_t g, int64_t c, int64_t n) {
    const T* grad_out = static_cast<const T*>(head.grad_out) + g * params.grad_out_head + c * params.grad_out_row;
    Real *grad = buffers.grad, *minus = buffers.minus;
    bool finite = map_rows(grad_out, params.grad_out_row, n, shape.Dv, Unchanged{}, nullptr, grad, shape.value_ld,
                           shape.value_cols);
    memset(minus, 0, size_t(chunk) * sizeof(Real));
    if (!params.normalize) return finite;
    const Real* denominator = static_cast<const Real*>(head.denominator) + g * params.q_len + c;
    const Real* given = static_cast<const Real*>(head.grad_denominator);
    const T* out = static_cast<const T*>(head.out) + (g * params.q_len + c) * shape.Dv;
    for (int64_t i = 0; i < n; i++) {
      Real* row = grad + i * shape.value_ld;
      const Real inverse = denominator[i] == Real(0) ? Real(0) : Real(1) / denominator[i];
      Vec<Real> lane_sums = Vec<Real>::zero();
      int64_t d = 0;
      for (; d + width <= shape.Dv; d += width) {
        const Vec<Real> numbers = load(row + d) * Vec<Real>::set(inverse);
        store(row + d, numbers);
        lane_sums = fma(numbers, load(out + i * shape.Dv + d), lane_sums);
      }
      Real dot = sum(lane_sums);
      for (; d < shape.Dv; d++) {
        row[d] *= inverse;
        dot += row[d] * Real(load_one(out + i * shape.Dv + d));
      }
      if (given) dot -= given[g * params.q_len + c + i];
      minus[i] = -dot;
      finite = finite && dot - dot == Real(0);
    }
    return finite;
  }

  // block (T, t) += sum over rows first .. first + count of all query heads
  static void sum_queries(const LinearParams& params, const LinearHead& head, int64_t first, int64_t count, Real* block,
                          void* space) {
    const Shape shape(params);
    const Buffers buffers = buffers_in<Buffers>(space, params);
    for (int64_t c = last_chunk(first, count); c >= first; c -= chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      for (int64_t g = 0; g < params.group; g++) {
        pack_grad(params, shape, buffers, head, g, c, n);
        pack_query(params, shape, buffers, head, g, c, n);
        RowPrefetch prefetch = rows_around(params, head, g, c - chunk, false);
        add_queries(shape, buffers, n, block, nullptr, prefetch);
      }
    }
  }

  static int64_t last_chunk(int64_t first, int64_t count) { return first + (count - 1) / chunk * chunk; }

  static bool pack_query(const LinearParams& params, const Shape& shape, const Buffers& buffers, const LinearHead& head,
                         int64_t g, int64_t c, int64_t n) {
    bool finite = true;
    const T* query = static_cast<const T*>(head.query) + g * params.q_head + c * params.q_row;
    with_feature_map(params.feature_map, [&](auto m) {
      finite = map_rows(query, params.q_row, n, shape.D, Feature<m.map, Real>{Real(params.scale)}, nullptr,
                        buffers.query, shape.key_ld, shape.key_cols);
    });
    return finite;
  }

  static void add_queries(const Shape& shape, const Buffers& buffers, int64_t n, Real* block, Real* also,
                          RowPrefetch& prefetch) {
    const Real *query = buffers.query, *minus = buffers.minus;
    multiply<true>(buffers, query, shape.key_ld, buffers.grad, shape.value_ld, n, shape.D, shape.value_cols, Band::full,
                   true, block, shape.value_cols, also, &prefetch);
    const int64_t z = shape.D * shape.value_cols;
    for (int64_t d = 0; d < shape.key_cols; d += width) {
      Vec<Real> added = Vec<Real>::zero();
      for (int64_t i = 0; i < n; i++)
        added = fma(load(query + i * shape.key_ld + d), Vec<Real>::broadcast(minus + i), added);
      store(block + z + d, load(block + z + d) + added);
      if (also) store(also + z + d, load(also + z + d) + added);
    }
  }

  // block (S^T, z) += sum over keys first .. first + count
  static void sum_keys(const LinearParams& params, const LinearHead& head, int64_t first, int64_t count, Real* block,
                       void* space) {
    const Shape shape(params);
    const Buffers buffers = buffers_in<Buffers>(space, params);
    for (int64_t c = first; c < first + count; c += chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      Forward::pack_keys(params, head, c, n, buffers.key, buffers.value);
      RowPrefetch prefetch;
      Forward::next_keys(params, head, c + chunk, prefetch);
      prefetch.start(min_of(chunk, params.kv_len - c - chunk));
      add_keys(shape, buffers, n, block, nullptr, prefetch);
    }
  }

  // what a sweep takes of query head g in rows `next` ..; `next` may be outside
  static RowPrefetch rows_around(const LinearParams& params, const LinearHead& head, int64_t g, int64_t next,
                                 bool keys) {
    RowPrefetch prefetch;
    prefetch.add(static_cast<const T*>(head.query) + g * params.q_head + next * params.q_row, params.q_row,
                 params.head_dim);
    prefetch.add(static_cast<const T*>(head.grad_out) + g * params.grad_out_head + next * params.grad_out_row,
                 params.grad_out_row, params.v_head_dim);
    if (params.normalize)
      prefetch.add(static_cast<const T*>(head.out) + (g * params.q_len + next) * params.v_head_dim, params.v_head_dim,
                   params.v_head_dim);
    if (keys && g == 0) Forward::next_keys(params, head, next, prefetch);
    if (next >= 0) prefetch.start(min_of(chunk, params.q_len - next));
    return prefetch;
  }

  static void add_keys(const Shape& shape, const Buffers& buffers, int64_t n, Real* block, Real* also,
                       RowPrefetch& prefetch) {
    multiply<true>(buffers, buffers.value, shape.value_ld, buffers.key, shape.key_ld, n, shape.Dv, shape.key_cols,
                   Band::full, true, block, shape.key_cols, also, &prefetch);
    const int64_t z = shape.Dv * shape.key_cols;
    add_row_sums(buffers.key, shape.key_ld, n, shape.key_cols, block + z, also ? also + z : nullptr);
  }

  // P^T [key][row] of the chunk, and dN^T
  static void weights(const Shape& shape, const Buffers& buffers, int64_t n, RowPrefetch& prefetch) {
    const int64_t lanes = round_up(n, width);
    multiply<false>(buffers, buffers.value, shape.value_ld, buffers.grad_t, lanes_ld, shape.Dv, n, lanes, Band::upper,
                    false, buffers.weights, lanes_ld, nullptr, &prefetch);
    clear_below_diagonal(buffers.weights, lanes_ld, n, lanes, static_cast<const Real*>(buffers.minus));
  }
  static void transpose_grad(const Shape& shape, const Buffers& buffers, int64_t n) {
    pack_transposed(static_cast<const Real*>(buffers.grad), shape.value_ld, n, shape.Dv, Unchanged{}, buffers.grad_t,
                    chunk, 0, lanes_ld);
  }

  // The forward sweep: grad_query of rows first .. first + count. Causal: `running` (S^T, z before `first`) moves on,
  // as in LinearForward::run; else it is that of all keys.
  static void query_sweep(const LinearParams& params, const LinearHead& head, int64_t first, int64_t count,
                          Real* running, Real* also, void* space) {
    const Shape shape(params);
    const Buffers buffers = buffers_in<Buffers>(space, params);
    Real* const out = buffers.grad_key;
    const Real* const z = running + shape.Dv * shape.key_cols;
    for (int64_t c = first; c < first + count; c += chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      bool key_finite = true;
      if (params.causal) Forward::pack_keys(params, head, c, n, buffers.key, buffers.value, &key_finite);
      RowPrefetch prefetch;
      for (int64_t g = 0; g < params.group; g++) {
        prefetch = rows_around(params, head, g, c + chunk, params.causal);
        pack_grad(params, shape, buffers, head, g, c, n);
        transpose_grad(shape, buffers, n);
        multiply<true>(buffers, buffers.grad_t, lanes_ld, running, shape.key_cols, shape.Dv, n, shape.key_cols,
                       Band::full, false, out, shape.key_ld, nullptr, &prefetch);
        for (int64_t i = 0; i < n; i++) {
          const Vec<Real> minus = Vec<Real>::broadcast(buffers.minus + i);
          for (int64_t d = 0; d < shape.key_cols; d += width)
            store(out + i * shape.key_ld + d, fma(minus, load(z + d), load(out + i * shape.key_ld + d)));
        }
        if (params.causal) {
          weights(shape, buffers, n, prefetch);
          multiply_band<true>(buffers, buffers.weights, lanes_ld, buffers.key, shape.key_ld, n, n, shape.key_cols,
                              Band::to_row, key_finite, out, shape.key_ld, &prefetch);
        }
        const T* query = static_cast<const T*>(head.query) + g * params.q_head + c * params.q_row;
        with_feature_map(params.feature_map, [&](auto m) {
          scale_by_slope(out, shape.key_ld, query, params.q_row, n, shape.D,
                         FeatureSlope<m.map, Real>{Real(params.scale)}, nullptr,
                         static_cast<T*>(head.grad_query) + (g * params.q_len + c) * shape.D);
        });
      }
      if (params.causal) add_keys(shape, buffers, n, running, also, prefetch);
    }
  }

  // The backward sweep: grad_key and grad_value of rows first .. first + count, both wanted or not at all. Causal:
  // `running` (T, t after the last row) moves to that before `first`; else it is that of all rows.
  static void key_sweep(const LinearParams& params, const LinearHead& head, int64_t first, int64_t count, Real* running,
                        Real* also, void* space) {
    const Shape shape(params);
    const Buffers buffers = buffers_in<Buffers>(space, params);
    Real *const gk = buffers.grad_key, *const gv = buffers.grad_value, *const state_t = buffers.state_t;
    const Real* const t = running + shape.D * shape.value_cols;
    const bool wanted = head.grad_key != nullptr;
    for (int64_t c = last_chunk(first, count); c >= first; c -= chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      if (wanted) {
        Forward::pack_keys(params, head, c, n, buffers.key, buffers.value);
        transpose_state(shape, running, state_t);
        multiply<false>(buffers, buffers.value, shape.value_ld, state_t, shape.key_ld, shape.Dv, n, shape.key_cols,
                        Band::full, false, gk, shape.key_ld);
        for (int64_t j = 0; j < n; j++)
          for (int64_t d = 0; d < shape.key_cols; d += width)
            store(gk + j * shape.key_ld + d, load(gk + j * shape.key_ld + d) + load(t + d));
        multiply<false>(buffers, buffers.key, shape.key_ld, running, shape.value_cols, shape.D, n, shape.value_cols,
                        Band::full, false, gv, shape.value_ld);
      }
      if (params.causal)
        for (int64_t g = 0; g < params.group; g++) {
          const bool grad_finite = pack_grad(params, shape, buffers, head, g, c, n);
          const bool query_finite = pack_query(params, shape, buffers, head, g, c, n);
          RowPrefetch prefetch = rows_around(params, head, g, c - chunk, wanted);
          if (wanted) own_chunk(shape, buffers, n, query_finite, grad_finite, prefetch);
          add_queries(shape, buffers, n, running, also, prefetch);
        }
      if (wanted) write_keys(params, shape, head, c, n, buffers.key, gk, gv);
    }
  }

  // what the rows of a chunk give to its own keys
  static void own_chunk(const Shape& shape, const Buffers& buffers, int64_t n, bool query_finite, bool grad_finite,
                        RowPrefetch& prefetch) {
    const int64_t lanes = round_up(n, width);
    pack_transposed(static_cast<const Real*>(buffers.query), shape.key_ld, n, shape.D, Unchanged{}, buffers.query_t,
                    chunk, 0, lanes_ld);
    transpose_grad(shape, buffers, n);
    multiply<false>(buffers, buffers.key, shape.key_ld, buffers.query_t, lanes_ld, shape.D, n, lanes, Band::upper,
                    false, buffers.scores, lanes_ld);
    clear_below_diagonal(buffers.scores, lanes_ld, n, lanes, static_cast<const Real*>(nullptr));
    weights(shape, buffers, n, prefetch);
    multiply_band<false>(buffers, buffers.weights, lanes_ld, buffers.query, shape.key_ld, n, n, shape.key_cols,
                         Band::from_row, query_finite, buffers.grad_key, shape.key_ld, &prefetch);
    multiply_band<false>(buffers, buffers.scores, lanes_ld, buffers.grad, shape.value_ld, n, n, shape.value_cols,
                         Band::from_row, grad_finite, buffers.grad_value, shape.value_ld);
  }

  // T [D][value_cols] -> T^T [Dv][key_ld], columns past D 0
  static void transpose_state(const Shape& shape, const Real* state, Real* out) {
    pack_transposed(state, shape.value_cols, shape.D, shape.Dv, Unchanged{}, out, shape.key_cols, 0, shape.key_ld);
  }

  // key: phi of the keys
  static void write_keys(const LinearParams& params, const Shape& shape, const LinearHead& head, int64_t c, int64_t n,
                         const Real* key, const Real* grad_key, const Real* grad_value) {
    const uint8_t* blocked = head.blocked ? head.blocked + c : nullptr;
    with_feature_map(params.feature_map, [&](auto m) {
      scale_by_slope(grad_key, shape.key_ld, key, shape.key_ld, n, shape.D, SlopeOfFeature<m.map, Real>{}, blocked,
                     static_cast<T*>(head.grad_key) + c * shape.D);
    });
    T* to = static_cast<T*>(head.grad_value) + c * shape.Dv;
    unpack_rows(grad_value, shape.value_ld, n, shape.Dv, Real(1), to, shape.Dv);
    for (int64_t j = 0; blocked && j < n; j++)
      if (blocked[j]) memset(static_cast<void*>(to + j * shape.Dv), 0, size_t(shape.Dv) * sizeof(T));
  }
};

}  // namespace
}  // namespace attnjourney
