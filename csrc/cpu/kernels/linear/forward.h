// Linear attention (Katharopoulos et al. 2020, arXiv 2006.16236) in chunks: with S = sum phi(k) v^T over the keys
// before a chunk and Q, K, V its rows, out = (Q S + lower(Q K^T) V) / (Q z + rowsum lower(Q K^T) + eps).
//
// A block is a state in compute precision: S [head_dim][ld of v_head_dim], then z [head_dim], padded to vectors.
#pragma once
#include "cpu/kernels/attention/band.h"
#include "cpu/kernels/common/scratch.h"
#include "feature_map.h"

namespace attnjourney {
namespace {

template <class Real>
struct LinearShape {
  static constexpr int width = Vec<Real>::width;
  static constexpr int64_t chunk = Tuning::linear_chunk;
  static constexpr int64_t line =
      64 / int64_t(sizeof(Real));                    // between rows of scratch: no collisions at powers of two
  static constexpr int64_t lanes_ld = chunk + line;  // of everything whose last dimension is the chunk's rows
  int64_t D, Dv, key_cols, value_cols, key_ld, value_ld;

  explicit LinearShape(const LinearParams& params)
      : D(params.head_dim),
        Dv(params.v_head_dim),
        key_cols(round_up(D, width)),
        value_cols(round_up(Dv, width)),
        key_ld(round_up(D, line) + line),
        value_ld(round_up(Dv, line) + line) {}
};

// sum += the rows of a matrix
template <class Real>
ATTN_NOINLINE void add_row_sums(const Real* matrix, int64_t ld, int64_t rows, int64_t cols, Real* sum, Real* also) {
  constexpr int width = Vec<Real>::width;
  for (int64_t d = 0; d < cols; d += width) {
    Vec<Real> added = Vec<Real>::zero();
    for (int64_t k = 0; k < rows; k++) added = added + load(matrix + k * ld + d);
    store(sum + d, load(sum + d) + added);
    if (also) store(also + d, load(also + d) + added);
  }
}

template <class T>
struct LinearForward {
  using Real = Compute<T>;
  using Shape = LinearShape<Real>;
  static constexpr int width = Shape::width;
  static constexpr int64_t chunk = Shape::chunk, lanes_ld = Shape::lanes_ld;

  struct Buffers {
    Real *key, *value, *out;  // [chunk][ld]
    Real* query_t;            // [head_dim][lanes_ld]
    Real* scores;             // [chunk][lanes_ld]
    Real* denominator;        // [chunk]
    Buffers(const LinearParams& params, Scratch& scratch) {
      const Shape shape(params);
      key = scratch.take<Real>(chunk * shape.key_ld);
      value = scratch.take<Real>(chunk * shape.value_ld);
      query_t = scratch.take<Real>(shape.D * lanes_ld);
      scores = scratch.take<Real>(chunk * lanes_ld);
      out = scratch.take<Real>(chunk * shape.value_ld);
      denominator = scratch.take<Real>(chunk);
    }
  };
  static int64_t space(const LinearParams& params) { return scratch_bytes<Buffers>(params); }

  // phi(k) and v of rows first .. into scratch; tells whether v is finite
  static bool pack_keys(const LinearParams& params, const LinearHead& head, int64_t first, int64_t count, Real* key,
                        Real* value, bool* key_finite = nullptr) {
    const Shape shape(params);
    const uint8_t* blocked = head.blocked ? head.blocked + first : nullptr;
    with_feature_map(params.feature_map, [&](auto m) {
      const Feature<m.map, Real> feature{Real(1)};
      const bool finite = map_rows(static_cast<const T*>(head.key) + first * params.k_row, params.k_row, count, shape.D,
                                   feature, blocked, key, shape.key_ld, shape.key_cols);
      if (key_finite) *key_finite = finite;
    });
    return map_rows(static_cast<const T*>(head.value) + first * params.v_row, params.v_row, count, shape.Dv,
                    Unchanged{}, blocked, value, shape.value_ld, shape.value_cols);
  }

  // block += sum over keys first .. first + count
  static void sum_keys(const LinearParams& params, const LinearHead& head, int64_t first, int64_t count, Real* block,
                       void* space) {
    const Shape shape(params);
    const Buffers buffers = buffers_in<Buffers>(space, params);
    for (int64_t c = first; c < first + count; c += chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      pack_keys(params, head, c, n, buffers.key, buffers.value);
      RowPrefetch prefetch;
      next_keys(params, head, c + chunk, prefetch);
      prefetch.start(min_of(chunk, params.kv_len - c - chunk));
      add_keys(shape, buffers.key, buffers.value, n, block, nullptr, &prefetch);
    }
  }

  static void add_keys(const Shape& shape, const Real* key, const Real* value, int64_t n, Real* block, Real* also,
                       RowPrefetch* prefetch) {
    multiply<true>(key, shape.key_ld, value, shape.value_ld, n, shape.D, shape.value_cols, Band::full, true, block,
                   shape.value_cols, also, prefetch);
    const int64_t z = shape.D * shape.value_cols;
    add_row_sums(key, shape.key_ld, n, shape.key_cols, block + z, also ? also + z : nullptr);
  }

  // Rows first .. first + count of every query head of the group. Causal: `running`, the state before `first`, becomes
  // that after the last row, and what is added to it is also added to `also`. Else `running` is the state of all keys.
  static void run(const LinearParams& params, const LinearHead& head, int64_t first, int64_t count, Real* running,
                  Real* also, void* space) {
    const Shape shape(params);
    const Buffers buffers = buffers_in<Buffers>(space, params);
    Real *const key = buffers.key, *const value = buffers.value;
    for (int64_t c = first; c < first + count; c += chunk) {
      const int64_t n = min_of(chunk, first + count - c);
      bool finite = true;
      if (params.causal) finite = pack_keys(params, head, c, n, key, value);
      RowPrefetch prefetch;
      for (int64_t g = 0; g < params.group; g++) {
        prefetch = next_rows(params, head, g, c + chunk);
        head_chunk(params, shape, buffers, head, g, c, n, finite, running, prefetch);
      }
      if (params.causal) add_keys(shape, key, value, n, running, also, &prefetch);
    }
  }

  static void next_keys(const LinearParams& params, const LinearHead& head, int64_t next, RowPrefetch& prefetch) {
    prefetch.add(static_cast<const T*>(head.key) + next * params.k_row, params.k_row, params.head_dim);
    prefetch.add(static_cast<const T*>(head.value) + next * params.v_row, params.v_row, params.v_head_dim);
  }
  static RowPrefetch next_rows(const LinearParams& params, const LinearHead& head, int64_t g, int64_t next) {
    RowPrefetch prefetch;
    prefetch.add(static_cast<const T*>(head.query) + g * params.q_head + next * params.q_row, params.q_row,
                 params.head_dim);
    prefetch.add(static_cast<const T*>(head.out) + (g * params.q_len + next) * params.v_head_dim, params.v_head_dim,
                 params.v_head_dim);
    if (params.causal && g == 0) next_keys(params, head, next, prefetch);
    prefetch.start(min_of(chunk, params.q_len - next));
    return prefetch;
  }

  static void head_chunk(const LinearParams& params, const Shape& shape, const Buffers& buffers, const LinearHead& head,
                         int64_t g, int64_t c, int64_t n, bool finite, const Real* state, RowPrefetch& prefetch) {
    Real *const query_t = buffers.query_t, *const scores = buffers.scores, *const out = buffers.out;
    Real* const denominator = buffers.denominator;
    const T* query = static_cast<const T*>(head.query) + g * params.q_head + c * params.q_row;
    with_feature_map(params.feature_map, [&](auto m) {
      pack_transposed(query, params.q_row, n, shape.D, Feature<m.map, Real>{Real(params.scale)}, query_t, chunk, 0,
                      lanes_ld);
    });
    const int64_t lanes = round_up(n, width);
    multiply<true>(query_t, lanes_ld, state, shape.value_cols, shape.D, n, shape.value_cols, Band::full, false, out,
                   shape.value_ld, static_cast<Real*>(nullptr), &prefetch);
    if (params.causal) {
      multiply<false>(buffers.key, shape.key_ld, query_t, lanes_ld, shape.D, n, lanes, Band::upper, false, scores,
                      lanes_ld);
      clear_below_diagonal(scores, lanes_ld, n, lanes, static_cast<const Real*>(nullptr));
      multiply_band<true>(scores, lanes_ld, buffers.value, shape.value_ld, n, n, shape.value_cols, Band::to_row, finite,
                          out, shape.value_ld, &prefetch);
    }
    T* to = static_cast<T*>(head.out) + (g * params.q_len + c) * shape.Dv;
    if (!params.normalize) return unpack_rows(out, shape.value_ld, n, shape.Dv, Real(1), to, shape.Dv);
    const Real* z = state + shape.D * shape.value_cols;
    for (int64_t i = 0; i < lanes; i += width) {
      Vec<Real> sum = Vec<Real>::zero(), own = Vec<Real>::zero();
      for (int64_t d = 0; d < shape.D; d++)
        sum = fma(load(query_t + d * lanes_ld + i), Vec<Real>::broadcast(z + d), sum);
      if (params.causal)
        for (int64_t j = 0; j < min_of(n, i + width); j++) own = own + load(scores + j * lanes_ld + i);
      store(denominator + i, sum + own + Vec<Real>::set(Real(params.eps)));
    }
    Real* saved = static_cast<Real*>(head.denominator) + g * params.q_len + c;
    for (int64_t i = 0; i < n; i++) {
      saved[i] = denominator[i];
      divide_row(out + i * shape.value_ld, shape.Dv, denominator[i], to + i * shape.Dv);
    }
  }

  // a denominator of 0 stands for a row that sees no key
  static ATTN_INLINE void divide_row(const Real* from, int64_t cols, Real by, T* to) {
    if (by == Real(0)) {
      memset(static_cast<void*>(to), 0, size_t(cols) * sizeof(T));
      return;
    }
    const Vec<Real> divisor = Vec<Real>::set(by);
    int64_t d = 0;
    for (; d + width <= cols; d += width) store(to + d, load(from + d) / divisor);
    for (; d < cols; d++) store_one(to + d, from[d] / by);
  }
};

}  // namespace
}  // namespace attnjourney
