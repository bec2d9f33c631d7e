// Vec of one lane: runs everywhere, and the shortest statement of what the other two must do.
#pragma once
#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

template <class C>
struct Vec {
  C v;
  using Mask = bool;
  static constexpr int width = 1;
  static Vec zero() { return {C(0)}; }
  static Vec set(C x) { return {x}; }
  static Vec broadcast(const C* p) { return {*p}; }
  static Vec iota() { return {C(0)}; }
};
using Vf = Vec<float>;
using Vd = Vec<double>;

template <class T>
ATTN_INLINE Vec<Compute<T>> load(const T* p) {
  return {load_one(p)};
}
template <class T>
ATTN_INLINE void store(T* p, Vec<Compute<T>> a) {
  store_one(p, a.v);
}

// whether there is a NaN in `count` rows of n numbers, `row` apart
ATTN_INLINE bool any_nan(const e4m3* rows, int64_t row, int64_t count, int64_t n) {
  bool any = false;
  for (int64_t k = 0; k < count; k++, rows += row)
    for (int64_t i = 0; i < n; i++) any |= (rows[i].bits & 0x7f) == 0x7f;
  return any;
}

template <class C>
ATTN_INLINE Vec<C> fma(Vec<C> a, Vec<C> b, Vec<C> c) {
  return {a.v * b.v + c.v};
}
// of single numbers, rounded as those of vectors
ATTN_INLINE float fma(float a, float b, float c) { return a * b + c; }
ATTN_INLINE double fma(double a, double b, double c) { return a * b + c; }
template <class C>
ATTN_INLINE Vec<C> operator+(Vec<C> a, Vec<C> b) {
  return {a.v + b.v};
}
template <class C>
ATTN_INLINE Vec<C> operator-(Vec<C> a, Vec<C> b) {
  return {a.v - b.v};
}
template <class C>
ATTN_INLINE Vec<C> operator*(Vec<C> a, Vec<C> b) {
  return {a.v * b.v};
}
template <class C>
ATTN_INLINE Vec<C> operator/(Vec<C> a, Vec<C> b) {
  return {a.v / b.v};
}
// as x86's maxps: the second operand where either is a NaN
template <class C>
ATTN_INLINE Vec<C> max(Vec<C> a, Vec<C> b) {
  return {a.v > b.v ? a.v : b.v};
}
template <class C>
ATTN_INLINE Vec<C> min(Vec<C> a, Vec<C> b) {
  return {a.v < b.v ? a.v : b.v};
}
template <class C>
ATTN_INLINE bool ge(Vec<C> a, Vec<C> b) {
  return a.v >= b.v;
}
template <class C>
ATTN_INLINE bool eq(Vec<C> a, Vec<C> b) {
  return a.v == b.v;
}
ATTN_INLINE bool both(bool a, bool b) { return a && b; }
ATTN_INLINE bool either(bool a, bool b) { return a || b; }
ATTN_INLINE bool any(bool a) { return a; }
template <class C>
ATTN_INLINE Vec<C> select(bool m, Vec<C> a, Vec<C> b) {
  return m ? a : b;
}
template <class C>
ATTN_INLINE C sum(Vec<C> a) {
  return a.v;
}
template <class C>
ATTN_INLINE C largest(Vec<C> a) {
  return a.v;
}
ATTN_INLINE Vf round(Vf a) { return {__builtin_rintf(a.v)}; }
ATTN_INLINE Vd round(Vd a) { return {__builtin_rint(a.v)}; }
// a * 2^n, n a whole number in the exponent range
ATTN_INLINE Vf scale_by_power(Vf a, Vf n) { return {a.v * bits_float(uint32_t(int32_t(n.v) + 127) << 23)}; }
ATTN_INLINE Vd scale_by_power(Vd a, Vd n) {
  const uint64_t u = uint64_t(int64_t(n.v) + 1023) << 52;
  double f;
  memcpy(&f, &u, 8);
  return {a.v * f};
}
template <class C>
ATTN_INLINE bool finite_bits(Vec<C> a) {
  return a.v - a.v == C(0);
}
template <class C>
ATTN_INLINE void transpose(Vec<C> (&)[1]) {}
// lane i of the result is the sum over the lanes of x[i]
template <class C>
ATTN_INLINE Vec<C> sums(const Vec<C> (&x)[1]) {
  return x[0];
}

// 32-bit lanes for the dropout counter
struct Lanes {
  uint32_t v;
};
ATTN_INLINE Lanes lanes_set(uint32_t x) { return {x}; }
ATTN_INLINE Lanes lanes_iota() { return {0}; }
ATTN_INLINE Lanes operator+(Lanes a, Lanes b) { return {a.v + b.v}; }
ATTN_INLINE Lanes operator^(Lanes a, Lanes b) { return {a.v ^ b.v}; }
ATTN_INLINE void multiply_wide(Lanes a, uint32_t m, Lanes& hi, Lanes& lo) {
  const uint64_t p = uint64_t{a.v} * m;
  hi.v = uint32_t(p >> 32);
  lo.v = uint32_t(p);
}
// x where the low (half 0) or high (half 1) 16 bits are at least `threshold`, else 0
ATTN_INLINE Vf keep_where(Lanes bits, int half, uint32_t threshold, Vf x) {
  return {(half ? bits.v >> 16 : bits.v & 0xffff) >= threshold ? x.v : 0.f};
}

}  // namespace
}  // namespace attnjourney
