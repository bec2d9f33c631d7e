// Backward of gated linear attention, in the notation of forward.h: a first sweep recomputes the states before all
// chunks and E, a second one goes from the last chunk to the first. With G the gradient of the state after a chunk, S
// the state before it, and sums over the query heads of a group:
//   dE = P^T dO + (e^(b_last - b) W) G     (1 + N)^T Z = dE     dV = Z
//   dP = lower(dO E^T)     dN = - strictly lower(Z E^T)
//   dQ = scale (e^(b_i - b_j) dP) W + e^b dO S^T              dK = (e^(b_i - b_j) dN) W - e^b Z S^T + beta dW
//   dW = (e^(b_i - b_j) dP)^T scale Q + (e^(b_i - b_j) dN)^T K + e^(b_last - b) E G^T
//   G <- e^(b_last) G + (e^b scale Q)^T dO - (e^b K)^T Z      dbeta_i = dW_i . k_i
// Memory: a state for every `chunk` rows, and E.
#pragma once
#include "forward.h"
#include "gate_gradient.h"

namespace attnjourney {
namespace {

template <class T>
struct GatedBackward {
  using Real = Compute<T>;
  using Shape = GatedShape<Real>;
  using Forward = GatedForward<T>;
  using Keys = typename Forward::Keys;
  static constexpr int width = Shape::width;
  static constexpr int64_t chunk = Shape::chunk, lanes_ld = Shape::lanes_ld;

  struct Buffers {
    Keys keys;
    GateGradient<Real> gate;
    Real *query, *query_inverse;
    Real *grad_out, *grad_errors;     // [chunk][value_ld]; dE, Z, - Z
    Real *errors_t, *state_t;         // [v_head_dim][lanes_ld]; [v_head_dim][key_ld], of G or S
    Real *scores, *weights;           // [chunk][lanes_ld]: P; dP or dN
    Real* writers;                    // [chunk][key_ld]: e^(b_last - b) W ...
    Real *read_pairs, *read_state;    // ... gradients of rows as readers of pairs, of the state
    Real *write_pairs, *write_state;  // ... and as what these are made of
    Real* diagonal;                   // ... the part of write_pairs from P[i][i]
    Real* state_grad;                 // G
    Real *states, *errors;            // before every `chunk` rows; E, [len][value_ld]
    Real* parts;                      // states before the chunks of `chunk` rows, where those are cut
    Buffers(const GatedParams& params, int64_t cols, int64_t len, Scratch& scratch)
        : keys(params, Shape(params, cols), scratch), gate(params.gate, Shape(params, cols), scratch) {
      const Shape shape(params, cols);
      const int64_t of_keys = chunk * shape.key_ld, of_values = chunk * shape.value_ld, square = chunk * lanes_ld;
      query = scratch.take<Real>(of_keys);
      query_inverse = scratch.take<Real>(chunk);
      grad_out = scratch.take<Real>(of_values);
      grad_errors = scratch.take<Real>(of_values);
      errors_t = scratch.take<Real>(round_up(cols, width) * lanes_ld);
      state_t = scratch.take<Real>(round_up(cols, width) * shape.key_ld);
      scores = scratch.take<Real>(square);
      weights = scratch.take<Real>(square);
      writers = scratch.take<Real>(of_keys);
      read_pairs = scratch.take<Real>(of_keys);
      read_state = scratch.take<Real>(of_keys);
      write_pairs = scratch.take<Real>(of_keys);
      write_state = scratch.take<Real>(of_keys);
      diagonal = scratch.take<Real>(of_keys);
      state_grad = scratch.take<Real>(shape.state);
      states = scratch.take<Real>((len / chunk + 2) * shape.state);
      errors = scratch.take<Real>(len * shape.value_ld);
      parts = scratch.take<Real>(params.gate == Gate::channel ? chunk * shape.state : 0);
    }
  };
  static int64_t space(const GatedParams& params, int64_t cols, int64_t len) {
    return scratch_bytes<Buffers>(params, cols, len);
  }

  static void run(const GatedParams& params, const GatedHead& head, void* space) {
    const Shape shape(params, head.cols);
    Scratch scratch(space);
    Buffers buffers(params, head.cols, head.len, scratch);
    recompute(params, shape, head, buffers);
    read_state(head.grad_state, params.v_head_dim, shape, buffers.state_grad);
    for (int64_t blocks = (head.len + chunk - 1) / chunk; blocks-- > 0;)
      block(params, shape, head, buffers, blocks * chunk, min_of(chunk, head.len - blocks * chunk));
    write_state(static_cast<const Real*>(buffers.state_grad), shape, head.grad_initial_state, params.v_head_dim);
  }

  // states and E of all rows
  static void recompute(const GatedParams& params, const Shape& shape, const GatedHead& head, Buffers& buffers) {
    read_state(head.initial_state, params.v_head_dim, shape, buffers.states);
    for (int64_t c = 0, n; c < head.len; c += n) {
      Real *const before = buffers.states + c / chunk * shape.state, *const after = before + shape.state;
      Real* const errors = buffers.errors + c * shape.value_ld;
      const bool first = c % chunk == 0;
      n = Forward::pack_keys(params, shape, head, c, Forward::rows_from(head, c), buffers.keys);
      Forward::errors(params, shape, head, c, n, buffers.keys, first ? before : after, errors);
      if (c + n == head.len) break;
      if (first) memcpy(after, before, size_t(shape.state) * sizeof(Real));
      Forward::advance(params, shape, buffers.keys, n, errors, after);
    }
  }

  // rows first .. first + count, one chunk or, where gates are strong, several
  static void block(const GatedParams& params, const Shape& shape, const GatedHead& head, Buffers& buffers,
                    int64_t first, int64_t count) {
    const Real* const state = buffers.states + first / chunk * shape.state;
    int64_t n = Forward::pack_keys(params, shape, head, first, count, buffers.keys);
    if (n == count) return rows(params, shape, head, buffers, state, first, n);
    int64_t starts[chunk];
    int64_t cuts = 0;
    Real* part = buffers.parts;
    memcpy(part, state, size_t(shape.state) * sizeof(Real));
    for (int64_t c = first;; part += shape.state) {
      starts[cuts++] = c;
      if (c + n == first + count) break;
      memcpy(part + shape.state, part, size_t(shape.state) * sizeof(Real));
      Forward::advance(params, shape, buffers.keys, n, buffers.errors + c * shape.value_ld, part + shape.state);
      c += n;
      n = Forward::pack_keys(params, shape, head, c, first + count - c, buffers.keys, false);
    }
    for (int64_t end = first + count; cuts-- > 0; end = starts[cuts], part -= shape.state) {
      Forward::pack_keys(params, shape, head, starts[cuts], end - starts[cuts], buffers.keys);
      rows(params, shape, head, buffers, part, starts[cuts], end - starts[cuts]);
    }
  }

  // One chunk, whose keys are packed: n rows from row c, with the state before them.
  static void rows(const GatedParams& params, const Shape& shape, const GatedHead& head, Buffers& b, const Real* state,
                   int64_t c, int64_t n) {
    const Real* const errors = b.errors + c * shape.value_ld;
    Keys& keys = b.keys;
    b.gate.clear(shape, n);
    memset(static_cast<void*>(b.write_pairs), 0, size_t(n * shape.key_ld) * sizeof(Real));
    memset(static_cast<void*>(b.diagonal), 0, size_t(n * shape.key_ld) * sizeof(Real));

    // through the state after the chunk
    Real* const G = b.state_grad;
    Forward::to_state_writers(params, shape, keys, n, keys.write, b.writers);
    multiply<false>(static_cast<const Real*>(b.writers), shape.key_ld, static_cast<const Real*>(G), shape.value_cols,
                    shape.D, n, shape.value_cols, Band::full, false, b.grad_errors, shape.value_ld);
    transpose_state(shape, G, b.state_t);
    times_state_transposed(shape, b, errors, n, b.write_state);
    b.gate.set_writes(shape, b.writers, b.write_state, n);
    b.gate.set_through(shape, keys.gates, state, G);
    decay_state(params.gate, static_cast<const Real*>(keys.gates.total), shape.D, shape.value_cols, G);

    transpose_state(shape, state, b.state_t);
    pack_transposed(errors, shape.value_ld, n, shape.cols, Unchanged{}, b.errors_t, chunk, 0, lanes_ld);
    for (int64_t g = 0; g < params.group; g++) query_rows(params, shape, head, b, g, c, n);
    if (params.delta)
      solve_triangle_transposed(static_cast<const Real*>(keys.pairs), lanes_ld, n, shape.value_cols, b.grad_errors,
                                shape.value_ld);
    if (head.grad_value)
      unpack_rows(static_cast<const Real*>(b.grad_errors), shape.value_ld, n, shape.cols, Real(1),
                  static_cast<T*>(head.grad_value) + c * params.v_head_dim, params.v_head_dim);
    if (params.delta) key_readers(params, shape, b, n);
    write_keys(params, shape, head, b, c, n);
    if (head.grad_gate) {
      const int64_t row = params.gate == Gate::channel ? shape.D : 1;
      b.gate.write(shape, n, static_cast<Real*>(head.grad_gate) + c * row, row);
    }
  }

  static void transpose_state(const Shape& shape, const Real* state, Real* to) {
    pack_transposed(state, shape.value_cols, shape.D, shape.cols, Unchanged{}, to, shape.key_cols, 0, shape.key_ld);
  }
  // rows [n][value_ld] times the state in state_t, transposed
  static void times_state_transposed(const Shape& shape, const Buffers& b, const Real* rows, int64_t n, Real* to) {
    multiply<false>(rows, shape.value_ld, static_cast<const Real*>(b.state_t), shape.key_ld, shape.cols, n,
                    shape.key_cols, Band::full, false, to, shape.key_ld);
  }

  // What `readers` [n][key_ld], of pairs, get from the gradients `grads` [n][value_ld] of what they have read: theirs
  // into read_pairs (without the diagonal) and read_state, that of the rows they read into write_pairs, of the state
  // into G. `products`: the readers' entries of pairs. Becomes readers of the state.
  static void readers_gradient(const GatedParams& params, const Shape& shape, Buffers& b, const Real* products,
                               Real* readers, const Real* grads, int64_t n) {
    const Real *const weights = b.weights, *const write = b.keys.write;
    multiply_lower(grads, shape.value_ld, static_cast<const Real*>(b.errors_t), lanes_ld, shape.cols, n, b.weights,
                   lanes_ld);
    b.gate.add_pairs(products, weights, n);
    if (params.gate == Gate::head) scale_lower(b.weights, static_cast<const Real*>(b.keys.gates.pairs), lanes_ld, n);
    multiply_triangle<true>(weights, lanes_ld, write, shape.key_ld, n, shape.key_cols, false, b.read_pairs,
                            shape.key_ld);
    multiply_triangle_transposed<true>(weights, lanes_ld, static_cast<const Real*>(readers), shape.key_ld, n,
                                       shape.key_cols, b.write_pairs, shape.key_ld);
    times_state_transposed(shape, b, grads, n, b.read_state);
    b.gate.add_elements(shape, readers, b.read_pairs, Real(1), n);
    b.gate.add_reads(shape, b.keys.gates, readers, b.read_state, n);
  }
  static void add_to_state(const Shape& shape, Buffers& b, const Real* readers, const Real* grads, int64_t n) {
    multiply<true>(readers, shape.key_ld, grads, shape.value_ld, n, shape.D, shape.value_cols, Band::full, true,
                   b.state_grad, shape.value_cols);
  }

  // read_pairs: the gradient of rows before their gates
  static void join_readers(const GatedParams& params, const Shape& shape, Buffers& b, int64_t n) {
    const Gates<Real>& gates = b.keys.gates;
    for (int64_t i = 0; i < n; i++) {
      const Vec<Real> read = Vec<Real>::set(params.gate == Gate::head ? gates.read[i] : Real(1));
      for (int64_t d = 0; d < shape.key_cols; d += width) {
        Real* const x = b.read_pairs + i * shape.key_ld + d;
        const Vec<Real> of_state = load(b.read_state + i * shape.key_ld + d);
        if (params.gate == Gate::channel)
          store(x, load(gates.up + i * gates.ld + d) * fma(load(gates.first + d), of_state, load(x)));
        else
          store(x, fma(read, of_state, load(x)));
      }
    }
  }

  static void query_rows(const GatedParams& params, const Shape& shape, const GatedHead& head, Buffers& b, int64_t g,
                         int64_t c, int64_t n) {
    Forward::pack_query(params, shape, head, b.keys, g, c, n, b.query, b.query_inverse);
    Forward::products(params, shape, b.keys, b.query, n, b.scores);
    pack_rows(static_cast<const T*>(head.grad_out) + g * params.grad_out_head + c * params.grad_out_row,
              params.grad_out_row, n, shape.cols, b.grad_out, shape.value_ld, shape.value_cols);
    multiply_triangle_transposed<false>(static_cast<const Real*>(b.scores), lanes_ld,
                                        static_cast<const Real*>(b.grad_out), shape.value_ld, n, shape.value_cols,
                                        b.grad_errors, shape.value_ld);
    readers_gradient(params, shape, b, b.scores, b.query, b.grad_out, n);
    for (int64_t i = 0; i < n; i++) {
      const Vec<Real> own = Vec<Real>::broadcast(b.weights + i * lanes_ld + i);
      for (int64_t at = i * shape.key_ld; at < i * shape.key_ld + shape.key_cols; at += width) {
        store(b.read_pairs + at, fma(own, load(b.keys.write + at), load(b.read_pairs + at)));
        store(b.diagonal + at, fma(own, load(b.query + at), load(b.diagonal + at)));
      }
    }
    join_readers(params, shape, b, n);
    Forward::to_state_readers(params, shape, b.keys, n, Real(1), b.query);
    add_to_state(shape, b, b.query, b.grad_out, n);
    if (!head.grad_query) return;
    const T* query = static_cast<const T*>(head.query) + g * params.q_head + c * params.q_row;
    if (head.partial)
      write_rows(params, shape, b.read_pairs, query, params.q_row, b.query_inverse, n, Real(params.scale),
                 static_cast<Real*>(head.grad_query) + g * params.grad_q_head + c * shape.D);
    else
      write_rows(params, shape, b.read_pairs, query, params.q_row, b.query_inverse, n, Real(params.scale),
                 static_cast<T*>(head.grad_query) + g * params.grad_q_head + c * shape.D);
  }

  // Keys as readers: grad_errors is Z and becomes - Z, read_pairs the gradient of keys.
  static void key_readers(const GatedParams& params, const Shape& shape, Buffers& b, int64_t n) {
    scale_each_row(static_cast<const Real*>(b.grad_errors), n, shape.value_cols, shape.value_ld,
                   static_cast<const Real*>(nullptr), Real(-1), b.grad_errors);
    readers_gradient(params, shape, b, b.keys.pairs, b.keys.key, b.grad_errors, n);
    join_readers(params, shape, b, n);
    Forward::to_state_readers(params, shape, b.keys, n, Real(1), b.keys.key);
    add_to_state(shape, b, b.keys.key, b.grad_errors, n);
  }

  // gradients of keys and betas
  static void write_keys(const GatedParams& params, const Shape& shape, const GatedHead& head, Buffers& b, int64_t c,
                         int64_t n) {
    const Gates<Real>& gates = b.keys.gates;
    b.gate.add_elements(shape, b.keys.write, b.write_pairs, Real(-1), n);
    const T* key = static_cast<const T*>(head.key) + c * params.k_row;
    for (int64_t i = 0; i < n; i++) {
      Real* const grad = b.write_pairs + i * shape.key_ld;
      const Vec<Real> written = Vec<Real>::set(params.gate == Gate::head ? gates.write[i] : Real(1));
      for (int64_t d = 0; d < shape.key_cols; d += width) {
        const int64_t at = i * shape.key_ld + d;
        const Vec<Real> of_state = load(b.write_state + at), own = load(grad + d) + load(b.diagonal + at);
        if (params.gate == Gate::channel)
          store(grad + d, load(gates.down + i * gates.ld + d) * fma(load(gates.last + d), of_state, own));
        else
          store(grad + d, fma(written, of_state, own));
      }
      if (head.grad_beta) {
        const Real dot = dot_with_tensor(static_cast<const Real*>(grad), key + i * params.k_row, shape.D);
        static_cast<Real*>(head.grad_beta)[c + i] = params.norm_eps >= 0 ? dot * b.keys.inverse[i] : dot;
      }
      const Vec<Real> beta = Vec<Real>::set(b.keys.one[i]);
      for (int64_t d = 0; d < shape.key_cols; d += width) {
        const Vec<Real> written_part = beta * load(grad + d);
        store(grad + d, params.delta ? load(b.read_pairs + i * shape.key_ld + d) + written_part : written_part);
      }
    }
    if (!head.grad_key) return;
    if (head.partial)
      write_rows(params, shape, b.write_pairs, key, params.k_row, b.keys.inverse, n, Real(1),
                 static_cast<Real*>(head.grad_key) + c * shape.D);
    else
      write_rows(params, shape, b.write_pairs, key, params.k_row, b.keys.inverse, n, Real(1),
                 static_cast<T*>(head.grad_key) + c * shape.D);
  }

  // gradients of rows, through their normalisation: with y = x inverse, inverse (dy - y (y . dy))
  template <class To>
  static ATTN_NOINLINE void write_rows(const GatedParams& params, const Shape& shape, Real* grads, const T* rows,
                                       int64_t row, const Real* inverse, int64_t n, Real scale, To* to) {
    for (int64_t i = 0; i < n && params.norm_eps >= 0; i++) {
      Real* const grad = grads + i * shape.key_ld;
      const T* const x = rows + i * row;
      const Real dot = dot_with_tensor(static_cast<const Real*>(grad), x, shape.D);
      const Real along = inverse[i] * inverse[i] * dot;
      const Vec<Real> times = Vec<Real>::set(inverse[i]), minus = Vec<Real>::set(-along);
      int64_t d = 0;
      for (; d + width <= shape.D; d += width) store(grad + d, times * fma(minus, load(x + d), load(grad + d)));
      for (; d < shape.D; d++) grad[d] = inverse[i] * (grad[d] - along * Real(load_one(x + d)));
    }
    unpack_rows(static_cast<const Real*>(grads), shape.key_ld, n, shape.D, scale, to, shape.D);
  }
};

}  // namespace
}  // namespace attnjourney
