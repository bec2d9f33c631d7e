// Vec for AArch64's Advanced SIMD, which every such processor has: 4 floats or 2 doubles.
#pragma once
#include <arm_neon.h>

#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

// Registers from and to memory of any type: the intrinsics would have it that of their elements, and kernels keep pairs
// of 16-bit numbers where they also keep floats.
template <class V>
ATTN_INLINE V from_memory(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
ATTN_INLINE void to_memory(void* p, V v) {
  memcpy(p, &v, sizeof v);
}

template <class C>
struct Vec;
template <>
struct Vec<float> {
  float32x4_t v;
  using Mask = uint32x4_t;
  static constexpr int width = 4;
  static ATTN_INLINE Vec zero() { return {vdupq_n_f32(0)}; }
  static ATTN_INLINE Vec set(float x) { return {vdupq_n_f32(x)}; }
  static ATTN_INLINE Vec broadcast(const float* p) { return {vdupq_n_f32(from_memory<float>(p))}; }
  static ATTN_INLINE Vec iota() { return {float32x4_t{0, 1, 2, 3}}; }
};
template <>
struct Vec<double> {
  float64x2_t v;
  using Mask = uint64x2_t;
  static constexpr int width = 2;
  static ATTN_INLINE Vec zero() { return {vdupq_n_f64(0)}; }
  static ATTN_INLINE Vec set(double x) { return {vdupq_n_f64(x)}; }
  static ATTN_INLINE Vec broadcast(const double* p) { return {vdupq_n_f64(from_memory<double>(p))}; }
  static ATTN_INLINE Vec iota() { return {float64x2_t{0, 1}}; }
};
using Vf = Vec<float>;
using Vd = Vec<double>;

ATTN_INLINE Vf load(const float* p) { return {from_memory<float32x4_t>(p)}; }
ATTN_INLINE Vd load(const double* p) { return {from_memory<float64x2_t>(p)}; }
ATTN_INLINE Vf load(const bf16* p) { return {vreinterpretq_f32_u32(vshll_n_u16(from_memory<uint16x4_t>(p), 16))}; }
ATTN_INLINE Vf load(const f16* p) { return {vcvt_f32_f16(from_memory<float16x4_t>(p))}; }
ATTN_INLINE Vf load(const mask_bool* p) {
  const uint32_t four = from_memory<uint32_t>(p);
  const uint32x4_t allowed = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
  const uint32x4_t infinite = vreinterpretq_u32_f32(vdupq_n_f32(-__builtin_inff()));
  return {vreinterpretq_f32_u32(vandq_u32(vceqzq_u32(allowed), infinite))};
}
ATTN_INLINE int32x4_t load_bytes(const void* p) {  // with their signs
  return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(from_memory<uint32_t>(p)))));
}
ATTN_INLINE Vf load(const i8* p) { return {vcvtq_f32_s32(load_bytes(p))}; }
ATTN_INLINE Vf widened_e4m3(uint32x4_t bytes) {  // as load_one
  const uint32x4_t bits = vandq_u32(vshlq_n_u32(bytes, 20), vdupq_n_u32(0x87f00000));
  return {vmulq_n_f32(vreinterpretq_f32_u32(bits), 0x1p120f)};
}
ATTN_INLINE Vf load(const finite_e4m3* p) { return widened_e4m3(vreinterpretq_u32_s32(load_bytes(p))); }
ATTN_INLINE Vf load(const e4m3* p) {
  const uint32x4_t bytes = vreinterpretq_u32_s32(load_bytes(p));
  const uint32x4_t nan = vceqq_u32(vshlq_n_u32(bytes, 25), vdupq_n_u32(0xfe000000));
  return {vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(widened_e4m3(bytes).v), nan))};
}
// whether there is a NaN in `count` rows of n numbers, `row` apart
ATTN_INLINE bool any_nan(const e4m3* rows, int64_t row, int64_t count, int64_t n) {
  uint8x16_t largest = vdupq_n_u8(0);
  bool any = false;
  for (int64_t k = 0; k < count; k++, rows += row) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
      largest = vmaxq_u8(largest, vandq_u8(from_memory<uint8x16_t>(rows + i), vdupq_n_u8(0x7f)));
    for (; i < n; i++) any |= (rows[i].bits & 0x7f) == 0x7f;
  }
  return any || vmaxvq_u8(largest) == 0x7f;
}
ATTN_INLINE void store(float* p, Vf a) { to_memory(p, a.v); }
ATTN_INLINE void store(double* p, Vd a) { to_memory(p, a.v); }
ATTN_INLINE void store(f16* p, Vf a) { to_memory(p, vcvt_f16_f32(a.v)); }
ATTN_INLINE void store(bf16* p, Vf a) {  // to nearest even; a NaN stays one
  const uint32x4_t u = vreinterpretq_u32_f32(a.v), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd);
  const uint32x4_t r = vbslq_u32(vceqq_f32(a.v, a.v), rounded, vdupq_n_u32(0x7fc00000));
  to_memory(p, vshrn_n_u32(r, 16));
}

ATTN_INLINE Vf fma(Vf a, Vf b, Vf c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
ATTN_INLINE Vd fma(Vd a, Vd b, Vd c) { return {vfmaq_f64(c.v, a.v, b.v)}; }
// of single numbers, rounded as those of vectors
ATTN_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ATTN_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
ATTN_INLINE Vf operator+(Vf a, Vf b) { return {vaddq_f32(a.v, b.v)}; }
ATTN_INLINE Vd operator+(Vd a, Vd b) { return {vaddq_f64(a.v, b.v)}; }
ATTN_INLINE Vf operator-(Vf a, Vf b) { return {vsubq_f32(a.v, b.v)}; }
ATTN_INLINE Vd operator-(Vd a, Vd b) { return {vsubq_f64(a.v, b.v)}; }
ATTN_INLINE Vf operator*(Vf a, Vf b) { return {vmulq_f32(a.v, b.v)}; }
ATTN_INLINE Vd operator*(Vd a, Vd b) { return {vmulq_f64(a.v, b.v)}; }
ATTN_INLINE Vf operator/(Vf a, Vf b) { return {vdivq_f32(a.v, b.v)}; }
ATTN_INLINE Vd operator/(Vd a, Vd b) { return {vdivq_f64(a.v, b.v)}; }
// The second operand where either is a NaN, as x86 has it: fmax would give the NaN, fmaxnm the number.
ATTN_INLINE Vf max(Vf a, Vf b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
ATTN_INLINE Vd max(Vd a, Vd b) { return {vbslq_f64(vcgtq_f64(a.v, b.v), a.v, b.v)}; }
ATTN_INLINE Vf min(Vf a, Vf b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
ATTN_INLINE Vd min(Vd a, Vd b) { return {vbslq_f64(vcltq_f64(a.v, b.v), a.v, b.v)}; }
ATTN_INLINE uint32x4_t ge(Vf a, Vf b) { return vcgeq_f32(a.v, b.v); }
ATTN_INLINE uint64x2_t ge(Vd a, Vd b) { return vcgeq_f64(a.v, b.v); }
ATTN_INLINE uint32x4_t eq(Vf a, Vf b) { return vceqq_f32(a.v, b.v); }
ATTN_INLINE uint64x2_t eq(Vd a, Vd b) { return vceqq_f64(a.v, b.v); }
ATTN_INLINE uint32x4_t both(uint32x4_t a, uint32x4_t b) { return vandq_u32(a, b); }
ATTN_INLINE uint64x2_t both(uint64x2_t a, uint64x2_t b) { return vandq_u64(a, b); }
ATTN_INLINE uint32x4_t either(uint32x4_t a, uint32x4_t b) { return vorrq_u32(a, b); }
ATTN_INLINE uint64x2_t either(uint64x2_t a, uint64x2_t b) { return vorrq_u64(a, b); }
ATTN_INLINE bool any(uint32x4_t m) { return vmaxvq_u32(m) != 0; }
ATTN_INLINE bool any(uint64x2_t m) { return any(vreinterpretq_u32_u64(m)); }
ATTN_INLINE Vf select(uint32x4_t m, Vf a, Vf b) { return {vbslq_f32(m, a.v, b.v)}; }
ATTN_INLINE Vd select(uint64x2_t m, Vd a, Vd b) { return {vbslq_f64(m, a.v, b.v)}; }
ATTN_INLINE float sum(Vf a) { return vaddvq_f32(a.v); }
ATTN_INLINE double sum(Vd a) { return vaddvq_f64(a.v); }
ATTN_INLINE Vf round(Vf a) { return {vrndnq_f32(a.v)}; }
ATTN_INLINE Vd round(Vd a) { return {vrndnq_f64(a.v)}; }
// a * 2^n, n a whole number in the exponent range, a in [0.5, 2): the exponent is added as an integer
ATTN_INLINE Vf scale_by_power(Vf a, Vf n) {
  return {vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v), vshlq_n_s32(vcvtq_s32_f32(n.v), 23)))};
}
ATTN_INLINE Vd scale_by_power(Vd a, Vd n) {
  return {vreinterpretq_f64_s64(vaddq_s64(vreinterpretq_s64_f64(a.v), vshlq_n_s64(vcvtq_s64_f64(n.v), 52)))};
}
ATTN_INLINE bool finite_bits(Vf a) { return vminvq_u32(eq(a - a, Vf::zero())) != 0; }
ATTN_INLINE bool finite_bits(Vd a) { return vminvq_u32(vreinterpretq_u32_u64(eq(a - a, Vd::zero()))) != 0; }

ATTN_INLINE void transpose(Vf (&r)[4]) {
  const float32x4x2_t a = vtrnq_f32(r[0].v, r[1].v), b = vtrnq_f32(r[2].v, r[3].v);
  ATTN_UNROLL for (int i = 0; i < 2; i++) {
    const float64x2_t upper = vreinterpretq_f64_f32(a.val[i]), lower = vreinterpretq_f64_f32(b.val[i]);
    r[i].v = vreinterpretq_f32_f64(vzip1q_f64(upper, lower));
    r[i + 2].v = vreinterpretq_f32_f64(vzip2q_f64(upper, lower));
  }
}
ATTN_INLINE void transpose(Vd (&r)[2]) {
  const float64x2_t first = vzip1q_f64(r[0].v, r[1].v);
  r[1].v = vzip2q_f64(r[0].v, r[1].v);
  r[0].v = first;
}

// lane i of the result is the sum over the lanes of x[i]
ATTN_INLINE Vf sums(const Vf (&x)[4]) { return {vpaddq_f32(vpaddq_f32(x[0].v, x[1].v), vpaddq_f32(x[2].v, x[3].v))}; }
ATTN_INLINE Vd sums(const Vd (&x)[2]) { return {vpaddq_f64(x[0].v, x[1].v)}; }

// 32-bit lanes for the dropout counter
struct Lanes {
  uint32x4_t v;
};
ATTN_INLINE Lanes lanes_set(uint32_t x) { return {vdupq_n_u32(x)}; }
ATTN_INLINE Lanes lanes_iota() { return {uint32x4_t{0, 1, 2, 3}}; }
ATTN_INLINE Lanes operator+(Lanes a, Lanes b) { return {vaddq_u32(a.v, b.v)}; }
ATTN_INLINE Lanes operator^(Lanes a, Lanes b) { return {veorq_u32(a.v, b.v)}; }
ATTN_INLINE void multiply_wide(Lanes a, uint32_t m, Lanes& hi, Lanes& lo) {
  const uint32x2_t factor = vdup_n_u32(m);
  const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a.v), factor));
  const uint32x4_t last = vreinterpretq_u32_u64(vmull_u32(vget_high_u32(a.v), factor));
  lo.v = vuzp1q_u32(first, last);
  hi.v = vuzp2q_u32(first, last);
}
ATTN_INLINE Vf keep_where(Lanes bits, int half, uint32_t threshold, Vf x) {
  const uint32x4_t h = half ? vshrq_n_u32(bits.v, 16) : vandq_u32(bits.v, vdupq_n_u32(0xffff));
  return {vreinterpretq_f32_u32(vandq_u32(vcgeq_u32(h, vdupq_n_u32(threshold)), vreinterpretq_u32_f32(x.v)))};
}

}  // namespace
}  // namespace attnjourney
