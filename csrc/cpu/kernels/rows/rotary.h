// The rotation of one row. T: the row's type as it lies in memory; Real: that of tables and arithmetic, float or
// double.
#pragma once
#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

// pair (x[j], x[j + half]) becomes (x1 cos - x2 sin, x2 cos + x1 sin); sign -1 turns the other way
template <class T, class Real>
void rotate_half_split(T* x, const Real* cos, const Real* sin, int64_t half, Real sign) {
  T* __restrict first = x, * __restrict second = x + half;
  for (int64_t j = 0; j < half; j++) {
    const Real x1 = load_one(first + j), x2 = load_one(second + j), c = cos[j], s = sign * sin[j];
    store_one(first + j, x1 * c - x2 * s);
    store_one(second + j, x2 * c + x1 * s);
  }
}

// the same for the pair (x[2 j], x[2 j + 1])
template <class T, class Real>
void rotate_interleaved(T* x, const Real* cos, const Real* sin, int64_t half, Real sign) {
  for (int64_t j = 0; j < half; j++) {
    const Real x1 = load_one(x + 2 * j), x2 = load_one(x + 2 * j + 1), c = cos[j], s = sign * sin[j];
    store_one(x + 2 * j, x1 * c - x2 * s);
    store_one(x + 2 * j + 1, x2 * c + x1 * s);
  }
}

}  // namespace
}  // namespace attnjourney
