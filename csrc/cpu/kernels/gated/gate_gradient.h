// The gradient of gates. Row t's gate multiplies whatever goes from before row t to row t or after it, so its gradient
// is the sum over all of that: pairs (i, j) with j < t <= i, reads of the state before the chunk by rows i >= t, what
// rows j < t add to the state after it, and the state that goes through.
#pragma once
#include "rows.h"

namespace attnjourney {
namespace {

template <class Real>
struct GateGradient {
  using Shape = GatedShape<Real>;
  static constexpr int width = Vec<Real>::width;
  static constexpr int64_t chunk = Shape::chunk, lanes_ld = Shape::lanes_ld;

  Gate kind = Gate::none;
  Real* corner = nullptr;  // [chunk][lanes_ld], a gate a head: pairs' products with their gradients
  // By rows, a number, or [chunk][key_ld] with a gate a channel: reads of the state, there with the pairs too (what a
  // row reads less what is read of it, without the diagonal, which has no gate: else that would cancel); writes to it.
  Real *reads = nullptr, *writes = nullptr;
  Real* through = nullptr;  // a number, or [key_ld]

  GateGradient() = default;
  GateGradient(Gate kind, const Shape& shape, Scratch& scratch) : kind(kind) {
    if (kind == Gate::none) return;
    const int64_t numbers = kind == Gate::head ? 1 : shape.key_ld;
    if (kind == Gate::head) corner = scratch.take<Real>(chunk * lanes_ld);
    reads = scratch.take<Real>(chunk * numbers);
    writes = scratch.take<Real>(chunk * numbers);
    through = scratch.take<Real>(max_of(numbers, width));
  }

  void clear(const Shape& shape, int64_t n) {
    if (kind == Gate::none) return;
    if (kind == Gate::head) memset(static_cast<void*>(corner), 0, size_t(n * lanes_ld) * sizeof(Real));
    memset(static_cast<void*>(reads), 0, size_t(kind == Gate::head ? n : n * shape.key_ld) * sizeof(Real));
  }

  // + the products of entries j <= i of two matrices
  ATTN_NOINLINE void add_pairs(const Real* a, const Real* b, int64_t n) {
    for (int64_t i = 0; kind == Gate::head && i < n; i++)
      for (int64_t j = 0; j <= i; j += width) {
        Real* const x = corner + i * lanes_ld + j;
        store(x, fma(load(a + i * lanes_ld + j), load(b + i * lanes_ld + j), load(x)));
      }
  }
  // + (or -) the products of elements, a gate a channel
  ATTN_NOINLINE void add_elements(const Shape& shape, const Real* a, const Real* b, Real sign, int64_t n) {
    const Vec<Real> signs = Vec<Real>::set(sign);
    for (int64_t i = 0; kind == Gate::channel && i < n; i++)
      for (int64_t d = i * shape.key_ld; d < i * shape.key_ld + shape.key_cols; d += width)
        store(reads + d, fma(signs * load(a + d), load(b + d), load(reads + d)));
  }
  // + rows that read the state (readers of pairs, see to_state_readers) times their gradients
  ATTN_NOINLINE void add_reads(const Shape& shape, const Gates<Real>& gates, const Real* rows, const Real* gradients,
                               int64_t n) {
    if (kind == Gate::head)
      for (int64_t i = 0; i < n; i++)
        reads[i] += gates.read[i] * dot_rows(rows + i * shape.key_ld, gradients + i * shape.key_ld, shape.key_cols);
    if (kind == Gate::channel)
      for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < shape.key_cols; d += width) {
          const int64_t at = i * shape.key_ld + d;
          store(reads + at, fma(load(rows + at) * load(gates.first + d), load(gradients + at), load(reads + at)));
        }
  }
  // = rows written to the state times their gradients
  ATTN_NOINLINE void set_writes(const Shape& shape, const Real* rows, const Real* gradients, int64_t n) {
    for (int64_t i = 0; kind != Gate::none && i < n; i++) {
      const Real *a = rows + i * shape.key_ld, *b = gradients + i * shape.key_ld;
      if (kind == Gate::head)
        writes[i] = dot_rows(a, b, shape.key_cols);
      else
        for (int64_t d = 0; d < shape.key_cols; d += width)
          store(writes + i * shape.key_ld + d, load(a + d) * load(b + d));
    }
  }
  // = the state before the chunk, decayed, times the gradient of that after it
  ATTN_NOINLINE void set_through(const Shape& shape, const Gates<Real>& gates, const Real* state,
                                 const Real* gradient) {
    if (kind == Gate::none) return;
    Real all = 0;
    for (int64_t d = 0; d < shape.D; d++) {
      const int64_t at = d * shape.value_cols;
      const Real row = dot_rows(state + at, gradient + at, shape.value_cols);
      if (kind == Gate::channel) through[d] = gates.total[d] * row;
      all += row;
    }
    if (kind == Gate::head) through[0] = gates.total[0] * all;
  }

  // the gradients of n rows' gates, `row` numbers apart
  void write(const Shape& shape, int64_t n, Real* to, int64_t row) {
    if (kind == Gate::head) write_head(n, to, row);
    if (kind == Gate::channel) write_channels(shape, n, to, row);
  }

 private:
  void write_head(int64_t n, Real* to, int64_t row) {
    alignas(64) Real columns[chunk + 64 / sizeof(Real)] = {};  // sums over i >= t
    Real before = through[0];
    for (int64_t t = 0; t < n; t++) {
      to[t * row] = before;
      before += writes[t];
    }
    Real after = 0;
    for (int64_t t = n - 1; t >= 0; t--) {
      after += reads[t];
      for (int64_t j = 0; j < t; j += width) store(columns + j, load(columns + j) + load(corner + t * lanes_ld + j));
      const int64_t whole = t / width * width;
      Vec<Real> lanes = Vec<Real>::zero();
      for (int64_t j = 0; j < whole; j += width) lanes = lanes + load(columns + j);
      Real pairs = sum(lanes);
      for (int64_t j = whole; j < t; j++) pairs += columns[j];
      to[t * row] += after + pairs;
    }
  }
  void write_channels(const Shape& shape, int64_t n, Real* to, int64_t row) {
    for (int64_t d = 0; d < shape.key_cols; d += width) {
      Vec<Real> after = Vec<Real>::zero(), before = load(through + d);
      for (int64_t i = n - 1; i >= 0; i--) {
        Real* const x = reads + i * shape.key_ld + d;
        after = after + load(x);
        store(x, after);
      }
      for (int64_t t = 0; t < n; t++) {
        Real* const x = reads + t * shape.key_ld + d;
        store(x, load(x) + before);
        before = before + load(writes + t * shape.key_ld + d);
      }
    }
    unpack_rows(static_cast<const Real*>(reads), shape.key_ld, n, shape.D, Real(1), to, row);
  }
};

}  // namespace
}  // namespace attnjourney
