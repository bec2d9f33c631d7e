// Gated linear attention one row at a time, for a few rows: a token of generation. Columns of the state are taken a
// register tile at a time, so that it is read from memory once a row.
#pragma once
#include "rows.h"

namespace attnjourney {
namespace {

template <class T>
struct GatedStep {
  using Real = Compute<T>;
  using Shape = GatedShape<Real>;
  static constexpr int width = Shape::width;
  static constexpr int64_t most_rows = 4;  // from which on chunks are faster

  struct Buffers {
    Real *query, *key, *write, *decay;  // [key_ld]
    Real *value, *out;                  // [value_ld]
    Real* state;
    Buffers(const GatedParams& params, int64_t cols, Scratch& scratch) {
      const Shape shape(params, cols);
      query = scratch.take<Real>(params.group * shape.key_ld);
      key = scratch.take<Real>(shape.key_ld);
      write = scratch.take<Real>(shape.key_ld);
      decay = scratch.take<Real>(shape.key_ld);
      value = scratch.take<Real>(shape.value_ld);
      out = scratch.take<Real>(params.group * shape.value_ld);
      state = scratch.take<Real>(shape.state);
    }
  };
  static int64_t space(const GatedParams& params, int64_t cols) { return scratch_bytes<Buffers>(params, cols); }

  static void run(const GatedParams& params, const GatedHead& head, void* space) {
    const Shape shape(params, head.cols);
    Scratch scratch(space);
    const Buffers buffers(params, head.cols, scratch);
    read_state(head.initial_state, params.v_head_dim, shape, buffers.state);
    for (int64_t i = 0; i < head.len; i++) row(params, shape, head, buffers, i);
    write_state(static_cast<const Real*>(buffers.state), shape, head.state, params.v_head_dim);
  }

  static void row(const GatedParams& params, const Shape& shape, const GatedHead& head, const Buffers& b, int64_t i) {
    Real inverse, beta = head.beta ? static_cast<const Real*>(head.beta)[i * params.beta_row] : Real(1);
    pack_normalised(static_cast<const T*>(head.key) + i * params.k_row, params.k_row, 1, shape.D, Real(1),
                    params.norm_eps, b.key, shape.key_ld, shape.key_cols, &inverse);
    scale_each_row(static_cast<const Real*>(b.key), 1, shape.key_cols, shape.key_ld, static_cast<const Real*>(&beta),
                   Real(1), b.write);
    for (int64_t g = 0; g < params.group; g++)
      pack_normalised(static_cast<const T*>(head.query) + g * params.q_head + i * params.q_row, params.q_row, 1,
                      shape.D, Real(params.scale), params.norm_eps, b.query + g * shape.key_ld, shape.key_ld,
                      shape.key_cols, &inverse);
    pack_rows(static_cast<const T*>(head.value) + i * params.v_row, params.v_row, 1, shape.cols, b.value,
              shape.value_ld, shape.value_cols);
    gates(params, shape, static_cast<const Real*>(head.gate), i, b.decay);
    split_vectors<Tuning::linear_vectors>(shape.value_cols / width, [&](int64_t v, auto vectors) {
      columns<vectors.count>(params, shape, b, v * width);
    });
    for (int64_t g = 0; g < params.group; g++)
      unpack_rows(static_cast<const Real*>(b.out) + g * shape.value_ld, shape.value_ld, 1, shape.cols, Real(1),
                  static_cast<T*>(head.out) + g * params.out_head + i * params.v_head_dim, params.v_head_dim);
  }

  static void gates(const GatedParams& params, const Shape& shape, const Real* gate, int64_t i, Real* decay) {
    for (int64_t d = 0; d < shape.D; d++)
      decay[d] = params.gate == Gate::none   ? Real(0)
                 : params.gate == Gate::head ? gate[i * params.gate_row]
                                             : gate[i * params.gate_row + d];
    for (int64_t d = shape.D; d < shape.key_cols; d++) decay[d] = Real(0);
    for (int64_t d = 0; d < shape.key_cols; d += width) store(decay + d, gate_exp<Real>(load(decay + d)));
  }

  template <int N>
  static ATTN_NOINLINE void columns(const GatedParams& params, const Shape& shape, const Buffers& b, int64_t c) {
    Real* const state = b.state + c;
    Vec<Real> error[N];
    ATTN_UNROLL for (int v = 0; v < N; v++) error[v] = load(b.value + c + v * width);
    if (params.delta) {
      Vec<Real> held[N];
      ATTN_UNROLL for (int v = 0; v < N; v++) held[v] = Vec<Real>::zero();
      for (int64_t d = 0; d < shape.D; d++) {
        const Vec<Real> factor = Vec<Real>::set(b.key[d] * b.decay[d]);
        ATTN_UNROLL for (int v = 0; v < N; v++) held[v] =
            fma(factor, load(state + d * shape.value_cols + v * width), held[v]);
      }
      ATTN_UNROLL for (int v = 0; v < N; v++) error[v] = error[v] - held[v];
    }
    for (int64_t d = 0; d < shape.D; d++) {
      const Vec<Real> write = Vec<Real>::broadcast(b.write + d), decay = Vec<Real>::broadcast(b.decay + d);
      ATTN_UNROLL for (int v = 0; v < N; v++) {
        Real* const x = state + d * shape.value_cols + v * width;
        store(x, fma(write, error[v], decay * load(x)));
      }
    }
    for (int64_t g = 0; g < params.group; g++) {
      Vec<Real> out[N];
      ATTN_UNROLL for (int v = 0; v < N; v++) out[v] = Vec<Real>::zero();
      for (int64_t d = 0; d < shape.D; d++) {
        const Vec<Real> factor = Vec<Real>::broadcast(b.query + g * shape.key_ld + d);
        ATTN_UNROLL for (int v = 0; v < N; v++) out[v] =
            fma(factor, load(state + d * shape.value_cols + v * width), out[v]);
      }
      ATTN_UNROLL for (int v = 0; v < N; v++) store(b.out + g * shape.value_ld + c + v * width, out[v]);
    }
  }
};

}  // namespace
}  // namespace attnjourney
