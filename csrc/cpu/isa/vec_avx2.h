// Vec for AVX2 + FMA + F16C: 8 floats or 4 doubles.
#pragma once
#include <immintrin.h>

#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

template <class C>
struct Vec;
template <>
struct Vec<float> {
  __m256 v;
  using Mask = Vec;
  static constexpr int width = 8;
  static ATTN_INLINE Vec zero() { return {_mm256_setzero_ps()}; }
  static ATTN_INLINE Vec set(float x) { return {_mm256_set1_ps(x)}; }
  static ATTN_INLINE Vec broadcast(const float* p) { return {_mm256_broadcast_ss(p)}; }
  static ATTN_INLINE Vec iota() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)}; }
};
template <>
struct Vec<double> {
  __m256d v;
  using Mask = Vec;
  static constexpr int width = 4;
  static ATTN_INLINE Vec zero() { return {_mm256_setzero_pd()}; }
  static ATTN_INLINE Vec set(double x) { return {_mm256_set1_pd(x)}; }
  static ATTN_INLINE Vec broadcast(const double* p) { return {_mm256_broadcast_sd(p)}; }
  static ATTN_INLINE Vec iota() { return {_mm256_setr_pd(0, 1, 2, 3)}; }
};
using Vf = Vec<float>;
using Vd = Vec<double>;

ATTN_INLINE Vf load(const float* p) { return {_mm256_loadu_ps(p)}; }
ATTN_INLINE Vd load(const double* p) { return {_mm256_loadu_pd(p)}; }
ATTN_INLINE Vf load(const bf16* p) {
  const __m128i u = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(u), 16))};
}
ATTN_INLINE Vf load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
ATTN_INLINE Vf load(const mask_bool* p) {
  const __m256i u = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256 hidden = _mm256_castsi256_ps(_mm256_cmpeq_epi32(u, _mm256_setzero_si256()));
  return {_mm256_and_ps(hidden, _mm256_set1_ps(-__builtin_inff()))};
}
ATTN_INLINE __m256i load_bytes(const void* p) {  // with their signs
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
ATTN_INLINE Vf load(const i8* p) { return {_mm256_cvtepi32_ps(load_bytes(p))}; }
ATTN_INLINE Vf widened_e4m3(__m256i bytes) {  // as load_one
  const __m256i bits = _mm256_and_si256(_mm256_slli_epi32(bytes, 20), _mm256_set1_epi32(int(0x87f00000)));
  return {_mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f))};
}
ATTN_INLINE Vf load(const finite_e4m3* p) { return widened_e4m3(load_bytes(p)); }
ATTN_INLINE Vf load(const e4m3* p) {
  const __m256i bytes = load_bytes(p);
  const __m256i nan = _mm256_cmpeq_epi32(_mm256_slli_epi32(bytes, 25), _mm256_set1_epi32(int(0xfe000000)));
  return {_mm256_or_ps(widened_e4m3(bytes).v, _mm256_castsi256_ps(nan))};
}
// whether there is a NaN in `count` rows of n numbers, `row` apart
ATTN_INLINE bool any_nan(const e4m3* rows, int64_t row, int64_t count, int64_t n) {
  const __m256i magnitude = _mm256_set1_epi8(0x7f);
  __m256i largest = _mm256_setzero_si256();
  bool any = false;
  for (int64_t k = 0; k < count; k++, rows += row) {
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + i));
      largest = _mm256_max_epu8(largest, _mm256_and_si256(bytes, magnitude));
    }
    for (; i < n; i++) any |= (rows[i].bits & 0x7f) == 0x7f;
  }
  return any || _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, magnitude)) != 0;
}
ATTN_INLINE void store(float* p, Vf a) { _mm256_storeu_ps(p, a.v); }
ATTN_INLINE void store(double* p, Vd a) { _mm256_storeu_pd(p, a.v); }
ATTN_INLINE void store(f16* p, Vf a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
ATTN_INLINE void store(bf16* p, Vf a) {  // to nearest even; a NaN stays one
  const __m256i u = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}

ATTN_INLINE Vf fma(Vf a, Vf b, Vf c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
ATTN_INLINE Vd fma(Vd a, Vd b, Vd c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
// of single numbers, rounded as those of vectors
ATTN_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ATTN_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
ATTN_INLINE Vf operator+(Vf a, Vf b) { return {_mm256_add_ps(a.v, b.v)}; }
ATTN_INLINE Vd operator+(Vd a, Vd b) { return {_mm256_add_pd(a.v, b.v)}; }
ATTN_INLINE Vf operator-(Vf a, Vf b) { return {_mm256_sub_ps(a.v, b.v)}; }
ATTN_INLINE Vd operator-(Vd a, Vd b) { return {_mm256_sub_pd(a.v, b.v)}; }
ATTN_INLINE Vf operator*(Vf a, Vf b) { return {_mm256_mul_ps(a.v, b.v)}; }
ATTN_INLINE Vd operator*(Vd a, Vd b) { return {_mm256_mul_pd(a.v, b.v)}; }
ATTN_INLINE Vf operator/(Vf a, Vf b) { return {_mm256_div_ps(a.v, b.v)}; }
ATTN_INLINE Vd operator/(Vd a, Vd b) { return {_mm256_div_pd(a.v, b.v)}; }
// the second operand where either is a NaN
ATTN_INLINE Vf max(Vf a, Vf b) { return {_mm256_max_ps(a.v, b.v)}; }
ATTN_INLINE Vd max(Vd a, Vd b) { return {_mm256_max_pd(a.v, b.v)}; }
ATTN_INLINE Vf min(Vf a, Vf b) { return {_mm256_min_ps(a.v, b.v)}; }
ATTN_INLINE Vd min(Vd a, Vd b) { return {_mm256_min_pd(a.v, b.v)}; }
ATTN_INLINE Vf ge(Vf a, Vf b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)}; }
ATTN_INLINE Vd ge(Vd a, Vd b) { return {_mm256_cmp_pd(a.v, b.v, _CMP_GE_OQ)}; }
ATTN_INLINE Vf eq(Vf a, Vf b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
ATTN_INLINE Vd eq(Vd a, Vd b) { return {_mm256_cmp_pd(a.v, b.v, _CMP_EQ_OQ)}; }
ATTN_INLINE Vf both(Vf a, Vf b) { return {_mm256_and_ps(a.v, b.v)}; }
ATTN_INLINE Vd both(Vd a, Vd b) { return {_mm256_and_pd(a.v, b.v)}; }
ATTN_INLINE Vf either(Vf a, Vf b) { return {_mm256_or_ps(a.v, b.v)}; }
ATTN_INLINE Vd either(Vd a, Vd b) { return {_mm256_or_pd(a.v, b.v)}; }
ATTN_INLINE bool any(Vf m) { return _mm256_movemask_ps(m.v) != 0; }
ATTN_INLINE bool any(Vd m) { return _mm256_movemask_pd(m.v) != 0; }
ATTN_INLINE Vf select(Vf m, Vf a, Vf b) { return {_mm256_blendv_ps(b.v, a.v, m.v)}; }
ATTN_INLINE Vd select(Vd m, Vd a, Vd b) { return {_mm256_blendv_pd(b.v, a.v, m.v)}; }
ATTN_INLINE float sum(Vf a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
ATTN_INLINE double sum(Vd a) {
  const __m128d s = _mm_add_pd(_mm256_castpd256_pd128(a.v), _mm256_extractf128_pd(a.v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}
ATTN_INLINE Vf round(Vf a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
ATTN_INLINE Vd round(Vd a) { return {_mm256_round_pd(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n, n a whole number in the exponent range, a in [0.5, 2): the exponent is added as an integer
ATTN_INLINE Vf scale_by_power(Vf a, Vf n) {
  const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), shift))};
}
ATTN_INLINE Vd scale_by_power(Vd a, Vd n) {
  const __m256i shift = _mm256_slli_epi64(_mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(n.v)), 52);
  return {_mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(a.v), shift))};
}
ATTN_INLINE bool finite_bits(Vf a) { return _mm256_movemask_ps(eq(a - a, Vf::zero()).v) == 0xff; }
ATTN_INLINE bool finite_bits(Vd a) { return _mm256_movemask_pd(eq(a - a, Vd::zero()).v) == 0xf; }

ATTN_INLINE void transpose(Vf (&r)[8]) {
  __m256 t[8], u[8];
  ATTN_UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  ATTN_UNROLL for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  ATTN_UNROLL for (int i = 0; i < 4; i++) {
    r[i].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}
ATTN_INLINE void transpose(Vd (&r)[4]) {
  __m256d t[4];
  ATTN_UNROLL for (int i = 0; i < 4; i += 2) {
    t[i] = _mm256_unpacklo_pd(r[i].v, r[i + 1].v);
    t[i + 1] = _mm256_unpackhi_pd(r[i].v, r[i + 1].v);
  }
  ATTN_UNROLL for (int i = 0; i < 2; i++) {
    r[i].v = _mm256_permute2f128_pd(t[i], t[i + 2], 0x20);
    r[i + 2].v = _mm256_permute2f128_pd(t[i], t[i + 2], 0x31);
  }
}

// lane i of the result is the sum over the lanes of x[i]
ATTN_INLINE Vf sums(const Vf (&x)[8]) {
  __m256 t[4], u[2];
  ATTN_UNROLL for (int i = 0; i < 4; i++) t[i] =
      _mm256_add_ps(_mm256_unpacklo_ps(x[2 * i].v, x[2 * i + 1].v), _mm256_unpackhi_ps(x[2 * i].v, x[2 * i + 1].v));
  ATTN_UNROLL for (int i = 0; i < 2; i++) u[i] =
      _mm256_add_ps(_mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44), _mm256_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee));
  return {_mm256_add_ps(_mm256_permute2f128_ps(u[0], u[1], 0x20), _mm256_permute2f128_ps(u[0], u[1], 0x31))};
}
ATTN_INLINE Vd sums(const Vd (&x)[4]) {
  const __m256d a = _mm256_add_pd(_mm256_unpacklo_pd(x[0].v, x[1].v), _mm256_unpackhi_pd(x[0].v, x[1].v));
  const __m256d b = _mm256_add_pd(_mm256_unpacklo_pd(x[2].v, x[3].v), _mm256_unpackhi_pd(x[2].v, x[3].v));
  return {_mm256_add_pd(_mm256_permute2f128_pd(a, b, 0x20), _mm256_permute2f128_pd(a, b, 0x31))};
}

// 32-bit lanes for the dropout counter
struct Lanes {
  __m256i v;
};
ATTN_INLINE Lanes lanes_set(uint32_t x) { return {_mm256_set1_epi32(int(x))}; }
ATTN_INLINE Lanes lanes_iota() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)}; }
ATTN_INLINE Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_epi32(a.v, b.v)}; }
ATTN_INLINE Lanes operator^(Lanes a, Lanes b) { return {_mm256_xor_si256(a.v, b.v)}; }
ATTN_INLINE void multiply_wide(Lanes a, uint32_t m, Lanes& hi, Lanes& lo) {
  const __m256i f = _mm256_set1_epi32(int(m));
  const __m256i even = _mm256_mul_epu32(a.v, f), odd = _mm256_mul_epu32(_mm256_srli_epi64(a.v, 32), f);
  lo.v = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  hi.v = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
ATTN_INLINE Vf keep_where(Lanes bits, int half, uint32_t threshold, Vf x) {
  const __m256i h = half ? _mm256_srli_epi32(bits.v, 16) : _mm256_and_si256(bits.v, _mm256_set1_epi32(0xffff));
  const __m256i keep = _mm256_cmpgt_epi32(h, _mm256_set1_epi32(int(threshold) - 1));
  return {_mm256_and_ps(_mm256_castsi256_ps(keep), x.v)};
}

}  // namespace
}  // namespace attnjourney
