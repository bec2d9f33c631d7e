// What nvcc supplies to a kernel file and g++ does not: vector types, 16-bit floats, keywords.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ kernels_use_dynamic_shared_memory_only

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
using std::max;
using std::min;

namespace emulator {

inline uint32_t bits_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

struct Bf16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// round to nearest even
inline uint16_t to_bf16(float f) {
  const uint32_t u = bits_of(f);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t b) { return float_of(static_cast<uint32_t>(b) << 16); }

inline uint16_t to_half(float f) {
  const uint32_t u = bits_of(f), a = u & 0x7fffffff, sign = u >> 16 & 0x8000;
  if (a > 0x7f800000) return 0x7fff;
  if (a >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and above
  if (a < 0x38800000) {                                              // subnormal: steps of 2^-24
    const double scaled = std::nearbyint(static_cast<double>(float_of(a)) * 16777216.0);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(scaled));
  }
  return static_cast<uint16_t>(sign | ((a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13));
}
inline float from_half(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  float f;
  if (exponent == 31)
    f = fraction ? NAN : INFINITY;
  else
    f = exponent ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25)
                 : std::ldexp(static_cast<float>(fraction), -24);
  return h & 0x8000 ? -f : f;
}

// float8_e4m3fn: no infinity, NaN where the last seven bits are set
inline float from_e4m3(uint8_t b) {
  const int exponent = b >> 3 & 15, fraction = b & 7;
  if ((b & 0x7f) == 0x7f) return NAN;
  const float f = exponent ? std::ldexp(static_cast<float>(8 + fraction), exponent - 10)
                           : std::ldexp(static_cast<float>(fraction), -9);
  return b & 0x80 ? -f : f;
}
// round to nearest even, at most 448 (cvt.rn.satfinite)
inline uint8_t to_e4m3(float f) {
  if (f != f) return 0x7f;
  const uint8_t sign = std::signbit(f) ? 0x80 : 0;
  const double size = std::fabs(static_cast<double>(f));
  if (size >= 448) return sign | 0x7e;
  const int exponent = std::max(-6, size > 0 ? std::ilogb(size) : -6);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));  // of 2^(exponent - 3)
  return static_cast<uint8_t>(sign | (steps + (exponent + 6) * 8));
}

}  // namespace emulator
