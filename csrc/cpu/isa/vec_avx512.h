// Vec for AVX-512 F, BW, DQ, VL: 16 floats or 8 doubles.
#pragma once
// g++ 12 takes the undefined pass-through operand of its own AVX-512 intrinsics for a use of an unset variable
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

template <class C>
struct Vec;
template <>
struct Vec<float> {
  __m512 v;
  using Mask = __mmask16;
  static constexpr int width = 16;
  static ATTN_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
  static ATTN_INLINE Vec set(float x) { return {_mm512_set1_ps(x)}; }
  static ATTN_INLINE Vec broadcast(const float* p) { return {_mm512_set1_ps(*p)}; }
  static ATTN_INLINE Vec iota() { return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
};
template <>
struct Vec<double> {
  __m512d v;
  using Mask = __mmask8;
  static constexpr int width = 8;
  static ATTN_INLINE Vec zero() { return {_mm512_setzero_pd()}; }
  static ATTN_INLINE Vec set(double x) { return {_mm512_set1_pd(x)}; }
  static ATTN_INLINE Vec broadcast(const double* p) { return {_mm512_set1_pd(*p)}; }
  static ATTN_INLINE Vec iota() { return {_mm512_setr_pd(0, 1, 2, 3, 4, 5, 6, 7)}; }
};
using Vf = Vec<float>;
using Vd = Vec<double>;

ATTN_INLINE Vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
ATTN_INLINE Vd load(const double* p) { return {_mm512_loadu_pd(p)}; }
ATTN_INLINE Vf load(const bf16* p) {
  const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(u), 16))};
}
ATTN_INLINE Vf load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
ATTN_INLINE Vf load(const mask_bool* p) {
  const __m128i u = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __mmask16 hidden = _mm_cmpeq_epi8_mask(u, _mm_setzero_si128());
  return {_mm512_maskz_mov_ps(hidden, _mm512_set1_ps(-__builtin_inff()))};
}
ATTN_INLINE __m512i load_bytes(const void* p) {  // with their signs
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
ATTN_INLINE Vf load(const i8* p) { return {_mm512_cvtepi32_ps(load_bytes(p))}; }
ATTN_INLINE Vf widened_e4m3(__m512i bytes) {  // as load_one
  const __m512i bits = _mm512_and_si512(_mm512_slli_epi32(bytes, 20), _mm512_set1_epi32(int(0x87f00000)));
  return {_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f))};
}
ATTN_INLINE Vf load(const finite_e4m3* p) { return widened_e4m3(load_bytes(p)); }
ATTN_INLINE Vf load(const e4m3* p) {
  const __m512i bytes = load_bytes(p);
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(_mm512_slli_epi32(bytes, 25), _mm512_set1_epi32(int(0xfe000000)));
  return {_mm512_mask_mov_ps(widened_e4m3(bytes).v, nan, _mm512_set1_ps(__builtin_nanf("")))};
}
// whether there is a NaN in `count` rows of n numbers, `row` apart
ATTN_INLINE bool any_nan(const e4m3* rows, int64_t row, int64_t count, int64_t n) {
  const __m512i magnitude = _mm512_set1_epi8(0x7f);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t k = 0; k < count; k++, rows += row)
    for (int64_t i = 0; i < n; i += 64) {
      const __mmask64 there = n - i >= 64 ? ~__mmask64{0} : (__mmask64{1} << (n - i)) - 1;
      largest = _mm512_max_epu8(largest, _mm512_and_si512(_mm512_maskz_loadu_epi8(there, rows + i), magnitude));
    }
  return _mm512_cmpeq_epi8_mask(largest, magnitude) != 0;
}
ATTN_INLINE void store(float* p, Vf a) { _mm512_storeu_ps(p, a.v); }
ATTN_INLINE void store(double* p, Vd a) { _mm512_storeu_pd(p, a.v); }
ATTN_INLINE void store(f16* p, Vf a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
ATTN_INLINE void store(bf16* p, Vf a) {  // to nearest even; a NaN stays one
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}

ATTN_INLINE Vf fma(Vf a, Vf b, Vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
ATTN_INLINE Vd fma(Vd a, Vd b, Vd c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
// of single numbers, rounded as those of vectors
ATTN_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ATTN_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
ATTN_INLINE Vf operator+(Vf a, Vf b) { return {_mm512_add_ps(a.v, b.v)}; }
ATTN_INLINE Vd operator+(Vd a, Vd b) { return {_mm512_add_pd(a.v, b.v)}; }
ATTN_INLINE Vf operator-(Vf a, Vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
ATTN_INLINE Vd operator-(Vd a, Vd b) { return {_mm512_sub_pd(a.v, b.v)}; }
ATTN_INLINE Vf operator*(Vf a, Vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
ATTN_INLINE Vd operator*(Vd a, Vd b) { return {_mm512_mul_pd(a.v, b.v)}; }
ATTN_INLINE Vf operator/(Vf a, Vf b) { return {_mm512_div_ps(a.v, b.v)}; }
ATTN_INLINE Vd operator/(Vd a, Vd b) { return {_mm512_div_pd(a.v, b.v)}; }
// the second operand where either is a NaN
ATTN_INLINE Vf max(Vf a, Vf b) { return {_mm512_max_ps(a.v, b.v)}; }
ATTN_INLINE Vd max(Vd a, Vd b) { return {_mm512_max_pd(a.v, b.v)}; }
ATTN_INLINE Vf min(Vf a, Vf b) { return {_mm512_min_ps(a.v, b.v)}; }
ATTN_INLINE Vd min(Vd a, Vd b) { return {_mm512_min_pd(a.v, b.v)}; }
ATTN_INLINE __mmask16 ge(Vf a, Vf b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
ATTN_INLINE __mmask8 ge(Vd a, Vd b) { return _mm512_cmp_pd_mask(a.v, b.v, _CMP_GE_OQ); }
ATTN_INLINE __mmask16 eq(Vf a, Vf b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
ATTN_INLINE __mmask8 eq(Vd a, Vd b) { return _mm512_cmp_pd_mask(a.v, b.v, _CMP_EQ_OQ); }
ATTN_INLINE __mmask16 both(__mmask16 a, __mmask16 b) { return a & b; }
ATTN_INLINE __mmask8 both(__mmask8 a, __mmask8 b) { return a & b; }
ATTN_INLINE __mmask16 either(__mmask16 a, __mmask16 b) { return a | b; }
ATTN_INLINE __mmask8 either(__mmask8 a, __mmask8 b) { return a | b; }
ATTN_INLINE bool any(__mmask16 m) { return m != 0; }
ATTN_INLINE bool any(__mmask8 m) { return m != 0; }
ATTN_INLINE Vf select(__mmask16 m, Vf a, Vf b) { return {_mm512_mask_blend_ps(m, b.v, a.v)}; }
ATTN_INLINE Vd select(__mmask8 m, Vd a, Vd b) { return {_mm512_mask_blend_pd(m, b.v, a.v)}; }
ATTN_INLINE float sum(Vf a) { return _mm512_reduce_add_ps(a.v); }
ATTN_INLINE double sum(Vd a) { return _mm512_reduce_add_pd(a.v); }
ATTN_INLINE Vf round(Vf a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
ATTN_INLINE Vd round(Vd a) { return {_mm512_roundscale_pd(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
ATTN_INLINE Vf scale_by_power(Vf a, Vf n) { return {_mm512_scalef_ps(a.v, n.v)}; }
ATTN_INLINE Vd scale_by_power(Vd a, Vd n) { return {_mm512_scalef_pd(a.v, n.v)}; }
ATTN_INLINE bool finite_bits(Vf a) { return eq(a - a, Vf::zero()) == 0xffff; }
ATTN_INLINE bool finite_bits(Vd a) { return eq(a - a, Vd::zero()) == 0xff; }

ATTN_INLINE void transpose(Vf (&x)[16]) {
  __m512 t[16], r[16];
  ATTN_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  ATTN_UNROLL for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  ATTN_UNROLL for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  ATTN_UNROLL for (int i = 0; i < 4; i++) {
    x[i].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    x[i + 8].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    x[i + 4].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    x[i + 12].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
ATTN_INLINE void transpose(Vd (&x)[8]) {
  __m512d t[8], r[8];
  ATTN_UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_pd(x[i].v, x[i + 1].v);
    t[i + 1] = _mm512_unpackhi_pd(x[i].v, x[i + 1].v);
  }
  ATTN_UNROLL for (int i = 0; i < 2; i++) {  // rows i, i+2, i+4, i+6 hold column pairs of rows (0,1) (2,3) (4,5) (6,7)
    r[i] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0x88);
    r[i + 2] = _mm512_shuffle_f64x2(t[i], t[i + 2], 0xdd);
    r[i + 4] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0x88);
    r[i + 6] = _mm512_shuffle_f64x2(t[i + 4], t[i + 6], 0xdd);
  }
  ATTN_UNROLL for (int i = 0; i < 2; i++) {
    x[i].v = _mm512_shuffle_f64x2(r[i], r[i + 4], 0x88);
    x[i + 4].v = _mm512_shuffle_f64x2(r[i], r[i + 4], 0xdd);
    x[i + 2].v = _mm512_shuffle_f64x2(r[i + 2], r[i + 6], 0x88);
    x[i + 6].v = _mm512_shuffle_f64x2(r[i + 2], r[i + 6], 0xdd);
  }
}

// lane i of the result is the sum over the lanes of x[i]
ATTN_INLINE Vf sums(const Vf (&x)[16]) {
  __m512 t[8], u[4], v[2];
  ATTN_UNROLL for (int i = 0; i < 8; i++) t[i] =
      _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i].v, x[2 * i + 1].v), _mm512_unpackhi_ps(x[2 * i].v, x[2 * i + 1].v));
  ATTN_UNROLL for (int i = 0; i < 4; i++) u[i] =
      _mm512_add_ps(_mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44), _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee));
  ATTN_UNROLL for (int i = 0; i < 2; i++) v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0x88),
                                                               _mm512_shuffle_f32x4(u[2 * i], u[2 * i + 1], 0xdd));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd))};
}
ATTN_INLINE Vd sums(const Vd (&x)[8]) {
  __m512d t[4], u[2];
  ATTN_UNROLL for (int i = 0; i < 4; i++) t[i] =
      _mm512_add_pd(_mm512_unpacklo_pd(x[2 * i].v, x[2 * i + 1].v), _mm512_unpackhi_pd(x[2 * i].v, x[2 * i + 1].v));
  ATTN_UNROLL for (int i = 0; i < 2; i++) u[i] = _mm512_add_pd(_mm512_shuffle_f64x2(t[2 * i], t[2 * i + 1], 0x88),
                                                               _mm512_shuffle_f64x2(t[2 * i], t[2 * i + 1], 0xdd));
  return {_mm512_add_pd(_mm512_shuffle_f64x2(u[0], u[1], 0x88), _mm512_shuffle_f64x2(u[0], u[1], 0xdd))};
}

// 32-bit lanes for the dropout counter
struct Lanes {
  __m512i v;
};
ATTN_INLINE Lanes lanes_set(uint32_t x) { return {_mm512_set1_epi32(int(x))}; }
ATTN_INLINE Lanes lanes_iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
ATTN_INLINE Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_epi32(a.v, b.v)}; }
ATTN_INLINE Lanes operator^(Lanes a, Lanes b) { return {_mm512_xor_si512(a.v, b.v)}; }
ATTN_INLINE void multiply_wide(Lanes a, uint32_t m, Lanes& hi, Lanes& lo) {
  const __m512i f = _mm512_set1_epi32(int(m));
  const __m512i even = _mm512_mul_epu32(a.v, f), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), f);
  lo.v = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  hi.v = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}
ATTN_INLINE Vf keep_where(Lanes bits, int half, uint32_t threshold, Vf x) {
  const __m512i h = half ? _mm512_srli_epi32(bits.v, 16) : _mm512_and_si512(bits.v, _mm512_set1_epi32(0xffff));
  return {_mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask(h, _mm512_set1_epi32(int(threshold))), x.v)};
}

}  // namespace
}  // namespace attnjourney
