// Linear attention with gates and the delta rule in chunks (Yang et al. 2024, arXiv 2406.06484 and 2412.06464; a gate a
// channel: Kimi Team 2025, arXiv 2510.26692), over the rows of one state head:
//   S = diag(e^g) S;  e = v - S^T k (delta) or v;  S = S + beta k e^T;  out = scale S^T q
//
// With S the state before a chunk, b as in gates.h, and w = beta k:
//   N[i][j] = k_i (e^(b_i - b_j) w_j), j < i     P[i][j] = scale q_i (e^(b_i - b_j) w_j), j <= i
//   (1 + N) E = V - (e^b K) S      out = (e^b scale Q) S + P E      S' = e^(b_last) S + (e^(b_last - b) W)^T E
// The triangular system is solved row by row on its right side, so that no inverse is formed (the WY form of a product
// of Householder matrices, applied). Work per chunk of C rows, in products: (3 D Dv + C (D + Dv)) C.
#pragma once
#include "rows.h"
#include "triangle.h"

namespace attnjourney {
namespace {

template <class T>
struct GatedForward {
  using Real = Compute<T>;
  using Shape = GatedShape<Real>;
  static constexpr int width = Shape::width;
  static constexpr int64_t chunk = Shape::chunk, lanes_ld = Shape::lanes_ld;

  // what the keys of a chunk give, also to the backward
  struct Keys {
    Real *key, *write;    // [chunk][key_ld]: k; w = beta k, the same where there is no delta rule
    Real* write_t;        // [head_dim][lanes_ld]
    Real* pairs;          // [chunk][lanes_ld]: N
    Real *inverse, *one;  // [chunk]: of normalised keys
    Gates<Real> gates;
    Keys(const GatedParams& params, const Shape& shape, Scratch& scratch) {
      key = scratch.take<Real>(chunk * shape.key_ld);
      write = scratch.take<Real>(chunk * shape.key_ld);
      write_t = scratch.take<Real>(round_up(shape.D, width) * lanes_ld);
      pairs = scratch.take<Real>(chunk * lanes_ld);
      inverse = scratch.take<Real>(chunk);
      one = scratch.take<Real>(chunk);
      gates = Gates<Real>(params.gate, shape.key_ld, shape.key_cols, scratch);
    }
  };
  struct Buffers {
    Keys keys;
    Real *query, *errors, *out;  // [chunk][ld]
    Real* scores;                // [chunk][lanes_ld]: P
    Real* state;
    Buffers(const GatedParams& params, int64_t cols, Scratch& scratch) : keys(params, Shape(params, cols), scratch) {
      const Shape shape(params, cols);
      query = scratch.take<Real>(chunk * shape.key_ld);
      errors = scratch.take<Real>(chunk * shape.value_ld);
      out = scratch.take<Real>(chunk * shape.value_ld);
      scores = scratch.take<Real>(chunk * lanes_ld);
      state = scratch.take<Real>(shape.state);
    }
  };
  static int64_t space(const GatedParams& params, int64_t cols) { return scratch_bytes<Buffers>(params, cols); }

  // The keys of up to `count` rows from row c: k e^(b - r) and w e^(r - b) with a gate a channel, else k and w; N.
  // Returns how many rows the chunk has.
  static int64_t pack_keys(const GatedParams& params, const Shape& shape, const GatedHead& head, int64_t c,
                           int64_t count, Keys& keys, bool pairs = true) {
    Gates<Real>& gates = keys.gates;
    const Real* gate = static_cast<const Real*>(head.gate);
    const int64_t n =
        gates.fill(params.gate, gate ? gate + c * params.gate_row : nullptr, params.gate_row, count, shape.D);
    pack_normalised(static_cast<const T*>(head.key) + c * params.k_row, params.k_row, n, shape.D, Real(1),
                    params.norm_eps, keys.key, shape.key_ld, shape.key_cols, keys.inverse);
    const Real* beta = static_cast<const Real*>(head.beta);
    for (int64_t i = 0; i < n; i++) keys.one[i] = beta ? beta[(c + i) * params.beta_row] : Real(1);
    scale_each_row(keys.key, n, shape.key_cols, shape.key_ld, keys.one, Real(1), keys.write);
    if (params.gate == Gate::channel) {
      scale_elements(keys.write, n, shape.key_cols, shape.key_ld, gates.down, gates.ld, keys.write);
      scale_elements(keys.key, n, shape.key_cols, shape.key_ld, gates.up, gates.ld, keys.key);
    }
    pack_transposed(static_cast<const Real*>(keys.write), shape.key_ld, n, shape.D, Unchanged{}, keys.write_t, chunk, 0,
                    lanes_ld);
    if (params.delta && pairs) products(params, shape, keys, keys.key, n, keys.pairs);
    return n;
  }

  // out[i][j] = rows_i (e^(b_i - b_j) w_j) for j <= i
  static void products(const GatedParams& params, const Shape& shape, const Keys& keys, const Real* rows, int64_t n,
                       Real* out) {
    multiply_lower(rows, shape.key_ld, static_cast<const Real*>(keys.write_t), lanes_ld, shape.D, n, out, lanes_ld);
    if (params.gate == Gate::head) scale_lower(out, static_cast<const Real*>(keys.gates.pairs), lanes_ld, n);
  }

  // Rows that read pairs -> rows that read the state before the chunk, times `times`.
  static void to_state_readers(const GatedParams& params, const Shape& shape, const Keys& keys, int64_t n, Real times,
                               Real* rows) {
    if (params.gate == Gate::channel)
      scale_elements(static_cast<const Real*>(rows), n, shape.key_cols, shape.key_ld,
                     static_cast<const Real*>(keys.gates.first), 0, rows);
    if (params.gate == Gate::head || times != Real(1))
      scale_each_row(static_cast<const Real*>(rows), n, shape.key_cols, shape.key_ld,
                     params.gate == Gate::head ? static_cast<const Real*>(keys.gates.read) : nullptr, times, rows);
  }
  // Rows that pairs read -> rows that the state after the chunk is made of.
  static void to_state_writers(const GatedParams& params, const Shape& shape, const Keys& keys, int64_t n,
                               const Real* rows, Real* to) {
    if (params.gate == Gate::channel)
      scale_elements(rows, n, shape.key_cols, shape.key_ld, static_cast<const Real*>(keys.gates.last), 0, to);
    else if (params.gate == Gate::head)
      scale_each_row(rows, n, shape.key_cols, shape.key_ld, static_cast<const Real*>(keys.gates.write), Real(1), to);
    else if (rows != to)
      scale_each_row(rows, n, shape.key_cols, shape.key_ld, static_cast<const Real*>(nullptr), Real(1), to);
  }

  // E of n rows from row c; with the delta rule keys.key becomes - e^b K
  static void errors(const GatedParams& params, const Shape& shape, const GatedHead& head, int64_t c, int64_t n,
                     Keys& keys, const Real* state, Real* to) {
    pack_rows(static_cast<const T*>(head.value) + c * params.v_row, params.v_row, n, shape.cols, to, shape.value_ld,
              shape.value_cols);
    if (!params.delta) return;
    to_state_readers(params, shape, keys, n, Real(-1), keys.key);
    multiply<false>(static_cast<const Real*>(keys.key), shape.key_ld, state, shape.value_cols, shape.D, n,
                    shape.value_cols, Band::full, true, to, shape.value_ld);
    solve_triangle(static_cast<const Real*>(keys.pairs), lanes_ld, n, shape.value_cols, to, shape.value_ld);
  }

  // the state after the chunk; keys.write becomes e^(b_last - b) W
  static void advance(const GatedParams& params, const Shape& shape, Keys& keys, int64_t n, const Real* errors,
                      Real* state) {
    to_state_writers(params, shape, keys, n, keys.write, keys.write);
    decay_state(params.gate, static_cast<const Real*>(keys.gates.total), shape.D, shape.value_cols, state);
    multiply<true>(static_cast<const Real*>(keys.write), shape.key_ld, errors, shape.value_ld, n, shape.D,
                   shape.value_cols, Band::full, true, state, shape.value_cols);
  }

  // how many rows a chunk from row c on may have: it ends where `chunk` divides the row
  static int64_t rows_from(const GatedHead& head, int64_t c) { return min_of(chunk - c % chunk, head.len - c); }

  static void run(const GatedParams& params, const GatedHead& head, void* space) {
    const Shape shape(params, head.cols);
    Scratch scratch(space);
    Buffers buffers(params, head.cols, scratch);
    read_state(head.initial_state, params.v_head_dim, shape, buffers.state);
    for (int64_t c = 0, n; c < head.len; c += n) {
      n = pack_keys(params, shape, head, c, rows_from(head, c), buffers.keys);
      errors(params, shape, head, c, n, buffers.keys, buffers.state, buffers.errors);
      for (int64_t g = 0; g < params.group; g++) write_out(params, shape, head, buffers, g, c, n);
      advance(params, shape, buffers.keys, n, buffers.errors, buffers.state);
    }
    write_state(static_cast<const Real*>(buffers.state), shape, head.state, params.v_head_dim);
  }

  // scale Q, times e^(b - r) with a gate a channel
  static void pack_query(const GatedParams& params, const Shape& shape, const GatedHead& head, const Keys& keys,
                         int64_t g, int64_t c, int64_t n, Real* query, Real* inverse) {
    pack_normalised(static_cast<const T*>(head.query) + g * params.q_head + c * params.q_row, params.q_row, n, shape.D,
                    Real(params.scale), params.norm_eps, query, shape.key_ld, shape.key_cols, inverse);
    if (params.gate == Gate::channel)
      scale_elements(static_cast<const Real*>(query), n, shape.key_cols, shape.key_ld,
                     static_cast<const Real*>(keys.gates.up), keys.gates.ld, query);
  }

  static void write_out(const GatedParams& params, const Shape& shape, const GatedHead& head, const Buffers& buffers,
                        int64_t g, int64_t c, int64_t n) {
    Real *const query = buffers.query, *const out = buffers.out;
    pack_query(params, shape, head, buffers.keys, g, c, n, query, buffers.keys.inverse);
    products(params, shape, buffers.keys, query, n, buffers.scores);
    to_state_readers(params, shape, buffers.keys, n, Real(1), query);
    multiply<false>(static_cast<const Real*>(query), shape.key_ld, static_cast<const Real*>(buffers.state),
                    shape.value_cols, shape.D, n, shape.value_cols, Band::full, false, out, shape.value_ld);
    multiply_triangle<false>(static_cast<const Real*>(buffers.scores), lanes_ld,
                             static_cast<const Real*>(buffers.errors), shape.value_ld, n, shape.value_cols, true, out,
                             shape.value_ld);
    unpack_rows(static_cast<const Real*>(out), shape.value_ld, n, shape.cols, Real(1),
                static_cast<T*>(head.out) + g * params.out_head + c * params.v_head_dim, params.v_head_dim);
  }
};

}  // namespace
}  // namespace attnjourney
