// Rows of a chunk in compute precision: packed, normalised, scaled.
#pragma once
#include "cpu/kernels/common/pack.h"
#include "cpu/kernels/common/scratch.h"
#include "gates.h"

namespace attnjourney {
namespace {

template <class Real>
struct GatedShape {
  static constexpr int width = Vec<Real>::width;
  static constexpr int64_t chunk = Gates<Real>::chunk;
  static constexpr int64_t line =
      64 / int64_t(sizeof(Real));                             // between rows of scratch: no collisions at powers of two
  static constexpr int64_t lanes_ld = Gates<Real>::lanes_ld;  // of what has the chunk's rows for columns
  int64_t D, cols, key_cols, value_cols, key_ld, value_ld, state;  // state: [D][value_cols], and its size

  GatedShape(const GatedParams& params, int64_t cols)
      : D(params.head_dim),
        cols(cols),
        key_cols(round_up(D, width)),
        value_cols(round_up(cols, width)),
        key_ld(round_up(D, line) + line),
        value_ld(round_up(cols, line) + line),
        state(D * value_cols) {}
};

ATTN_INLINE float square_root(float x) { return __builtin_sqrtf(x); }
ATTN_INLINE double square_root(double x) { return __builtin_sqrt(x); }

template <class Real>
ATTN_INLINE Real dot_rows(const Real* a, const Real* b, int64_t padded) {
  Vec<Real> lanes = Vec<Real>::zero();
  for (int64_t d = 0; d < padded; d += Vec<Real>::width) lanes = fma(load(a + d), load(b + d), lanes);
  return sum(lanes);
}

// the same with a row of a tensor, without padding
template <class T>
ATTN_INLINE Compute<T> dot_with_tensor(const Compute<T>* a, const T* x, int64_t n) {
  using Real = Compute<T>;
  constexpr int width = Vec<Real>::width;
  Vec<Real> lanes = Vec<Real>::zero();
  int64_t d = 0;
  for (; d + width <= n; d += width) lanes = fma(load(a + d), load(x + d), lanes);
  Real rest = 0;
  for (; d < n; d++) rest += a[d] * Real(load_one(x + d));
  return sum(lanes) + rest;
}

// to = factor * rows, columns cols .. padded 0; with eps >= 0, each divided by sqrt(sum of squares + eps), the inverse
// of which goes to `inverse`
template <class T>
ATTN_NOINLINE void pack_normalised(const T* from, int64_t ld, int64_t rows, int64_t cols, Compute<T> factor, double eps,
                                   Compute<T>* to, int64_t to_ld, int64_t padded, Compute<T>* inverse) {
  using Real = Compute<T>;
  constexpr int width = Vec<Real>::width;
  for (int64_t i = 0; i < rows; i++) {
    Real* const row = to + i * to_ld;
    const T* const x = from + i * ld;
    int64_t d = 0;
    for (; d + width <= cols; d += width) store(row + d, load(x + d));
    for (; d < cols; d++) row[d] = load_one(x + d);
    for (; d < padded; d++) row[d] = Real(0);
    Real times = factor;
    if (eps >= 0) {
      inverse[i] = Real(1) / square_root(dot_rows(row, row, padded) + Real(eps));
      times *= inverse[i];
    }
    if (times == Real(1)) continue;
    const Vec<Real> factors = Vec<Real>::set(times);
    for (d = 0; d < padded; d += width) store(row + d, load(row + d) * factors);
  }
}

// to[i] = times * factors[i] * rows[i], a number a row (null: 1)
template <class Real>
ATTN_NOINLINE void scale_each_row(const Real* rows, int64_t n, int64_t cols, int64_t ld, const Real* factors,
                                  Real times, Real* to) {
  for (int64_t i = 0; i < n; i++) {
    const Vec<Real> factor = Vec<Real>::set(factors ? factors[i] * times : times);
    for (int64_t d = 0; d < cols; d += Vec<Real>::width) store(to + i * ld + d, load(rows + i * ld + d) * factor);
  }
}
// the same with a number an element, or (factors_ld == 0) a column
template <class Real>
ATTN_NOINLINE void scale_elements(const Real* rows, int64_t n, int64_t cols, int64_t ld, const Real* factors,
                                  int64_t factors_ld, Real* to) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t d = 0; d < cols; d += Vec<Real>::width)
      store(to + i * ld + d, load(rows + i * ld + d) * load(factors + i * factors_ld + d));
}

// matrix[i][j] *= factors[i][j] for j <= i
template <class Real>
ATTN_NOINLINE void scale_lower(Real* matrix, const Real* factors, int64_t ld, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j <= i; j += Vec<Real>::width)
      store(matrix + i * ld + j, load(matrix + i * ld + j) * load(factors + i * ld + j));
}

// state [D][cols] *= the gates of a chunk
template <class Real>
ATTN_NOINLINE void decay_state(Gate gate, const Real* total, int64_t D, int64_t cols, Real* state) {
  if (gate == Gate::none) return;
  for (int64_t d = 0; d < D; d++) {
    const Vec<Real> factor = Vec<Real>::broadcast(total + (gate == Gate::head ? 0 : d));
    for (int64_t e = 0; e < cols; e += Vec<Real>::width)
      store(state + d * cols + e, load(state + d * cols + e) * factor);
  }
}

// between a state in a tensor, rows `ld` apart, and one in scratch; null reads as 0
template <class Real>
ATTN_NOINLINE void read_state(const void* from, int64_t ld, const GatedShape<Real>& shape, Real* state) {
  memset(static_cast<void*>(state), 0, size_t(shape.state) * sizeof(Real));
  for (int64_t d = 0; from && d < shape.D; d++)
    memcpy(state + d * shape.value_cols, static_cast<const Real*>(from) + d * ld, size_t(shape.cols) * sizeof(Real));
}
template <class Real>
ATTN_NOINLINE void write_state(const Real* state, const GatedShape<Real>& shape, void* to, int64_t ld) {
  for (int64_t d = 0; to && d < shape.D; d++)
    memcpy(static_cast<Real*>(to) + d * ld, state + d * shape.value_cols, size_t(shape.cols) * sizeof(Real));
}

}  // namespace
}  // namespace attnjourney
