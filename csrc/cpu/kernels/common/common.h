// Small things every CPU kernel uses. Kernel headers live in an unnamed namespace and call no STL function: what is
// compiled for AVX-512 must never be picked by the linker for an older CPU. The little that files of an instruction set
// share (shared.h) is in a namespace of its name, ATTN_ISA.
#pragma once
#include <cstdint>
#include <cstring>

#include "core/constants.h"

#define ATTN_INLINE __attribute__((always_inline)) inline
#define ATTN_NOINLINE __attribute__((noinline))
#define ATTN_UNROLL _Pragma("GCC unroll 32")

namespace attnjourney {

// Numbers as they lie in memory. Those of 16 and 8 bits are computed with in float.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct i8 {
  int8_t value;
};
struct e4m3 {
  uint8_t bits;
};  // float8_e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; no inf, NaN where the last seven are set
struct finite_e4m3 {
  uint8_t bits;
};  // one that is no NaN, which takes a third less to widen
struct mask_bool {
  uint8_t value;
};  // true = may attend; loads as 0 or -inf, to be added

template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeOf<T>::type;

namespace {

ATTN_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
ATTN_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
ATTN_INLINE int64_t round_up(int64_t x, int64_t m) { return (x + m - 1) / m * m; }

ATTN_INLINE float bits_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
ATTN_INLINE uint32_t float_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

ATTN_INLINE float load_one(const float* p) { return *p; }
ATTN_INLINE double load_one(const double* p) { return *p; }
ATTN_INLINE float load_one(const bf16* p) { return bits_float(uint32_t{p->bits} << 16); }
ATTN_INLINE float load_one(const mask_bool* p) { return p->value ? 0.f : -__builtin_inff(); }
ATTN_INLINE float load_one(const f16* p) {
  const uint32_t sign = uint32_t(p->bits & 0x8000) << 16, magnitude = p->bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ff) << 13));  // inf, NaN
  // exponent moved by a multiplication, which also normalises the small ones: 2^(127-15)
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}
ATTN_INLINE float load_one(const i8* p) { return float(p->value); }
ATTN_INLINE float load_one(const finite_e4m3* p) {
  const uint32_t sign = uint32_t(p->bits & 0x80) << 24, magnitude = p->bits & 0x7f;
  return bits_float(sign | float_bits(bits_float(magnitude << 20) * 0x1p120f));  // as above: 2^(127-7)
}
ATTN_INLINE float load_one(const e4m3* p) {
  const finite_e4m3 finite{p->bits};
  return (p->bits & 0x7f) == 0x7f ? __builtin_nanf("") : load_one(&finite);
}

ATTN_INLINE void store_one(float* p, float x) { *p = x; }
ATTN_INLINE void store_one(double* p, double x) { *p = x; }
ATTN_INLINE void store_one(bf16* p, float x) {  // to nearest even; a NaN stays one
  const uint32_t u = float_bits(x);
  p->bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
ATTN_INLINE void store_one(f16* p, float x) {
  const uint32_t u = float_bits(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  uint32_t r;
  if (a > 0x7f800000)
    r = 0x7e00;
  else if (a >= 0x477ff000)
    r = 0x7c00;  // rounds to 65520 or more
  else if (a < 0x38800000)
    r = float_bits(bits_float(a) + 0.5f) - 0x3f000000;  // below 2^-14: the addition rounds
  else
    r = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  p->bits = uint16_t(sign | r);
}
// To nearest even, at most the largest number. A NaN becomes 0: bytes have none.
ATTN_INLINE void store_one(i8* p, float x) {
  const float bounded = x < -127.f ? -127.f : x > 127.f ? 127.f : x;
  const uint32_t rounded = float_bits(bounded + 0x1.8p23f) - float_bits(0x1.8p23f);
  p->value = int8_t(x == x ? rounded : 0);
}
// To nearest even, at most the largest number, 448; an inf, too, becomes a NaN.
ATTN_INLINE void store_one(e4m3* p, float x) {
  const uint32_t u = float_bits(x), sign = (u >> 24) & 0x80, a = u & 0x7fffffff;
  const uint32_t small = float_bits(bits_float(a) + 0x1p14f) - float_bits(0x1p14f);  // below 2^-6: of 2^-9
  const uint32_t normal = ((a + 0x7ffff + ((a >> 20) & 1)) >> 20) - (120 << 3);
  const uint32_t rounded = a < 0x3c800000 ? small : normal < 0x7e ? normal : 0x7e;
  p->bits = uint8_t(a >= 0x7f800000 ? 0x7f : sign | rounded);
}

}  // namespace
}  // namespace attnjourney
