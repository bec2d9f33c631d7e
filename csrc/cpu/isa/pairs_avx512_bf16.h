// Products of bfloat16 pairs (AVX-512 BF16): what vec_avx512.h does not have.
#pragma once
#include "vec_avx512.h"

namespace attnjourney {
namespace {

// 16 lanes of two bfloat16 numbers: low half first
struct Pairs {
  __m512i v;
  static constexpr int width = 16;
};
ATTN_INLINE Pairs load_pairs(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
ATTN_INLINE void store_pairs(uint32_t* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
// two neighbours in memory, at any 2-byte boundary
using PairForAll = Pairs;
ATTN_INLINE PairForAll broadcast_pair(const void* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
// sum + a.low * b.low + a.high * b.high
ATTN_INLINE Vf dot_pairs(Vf sum, Pairs a, Pairs b) {
  return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
}
// numbers i and i + 16 of 32 side by side
ATTN_INLINE Pairs halves_side_by_side(Pairs a) {
  const __m512i zipped = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                          21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return {_mm512_permutexvar_epi16(zipped, a.v)};
}
// rounded to nearest even
ATTN_INLINE Pairs round_pairs(Vf low, Vf high) {
  return halves_side_by_side({reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v))});
}
// 32 numbers in a row, rounded to nearest even
ATTN_INLINE Pairs round_neighbours(Vf first, Vf second) {
  return {reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v))};
}
// sum + a.low + a.high
ATTN_INLINE Vf add_pairs(Vf sum, Pairs a) { return dot_pairs(sum, a, {_mm512_set1_epi32(0x3f803f80)}); }
// 1 / a to 2^-23, a normal
ATTN_INLINE Vf reciprocal(Vf a) {
  const __m512 r = _mm512_rcp14_ps(a.v);
  return {_mm512_fmadd_ps(r, _mm512_fnmadd_ps(a.v, r, _mm512_set1_ps(1.f)), r)};
}
// rows a and b, 16 columns of each -> (a[d], b[d])
ATTN_INLINE Pairs zip(const bf16* a, const bf16* b) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
  return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}
ATTN_INLINE bool all_finite(Pairs a) {
  const __m512i exponent = _mm512_set1_epi32(0x7f807f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(a.v, exponent), exponent) == 0;
}
// the halves whose 16 bits are at least the threshold, else 0; threshold 65536 keeps none
ATTN_INLINE Pairs keep_pairs(Lanes bits, uint32_t threshold, Pairs a) {
  if (threshold > 0xffff) return {_mm512_setzero_si512()};
  return {_mm512_maskz_mov_epi16(_mm512_cmpge_epu16_mask(bits.v, _mm512_set1_epi16(int16_t(threshold))), a.v)};
}

// the numbers of x, rounded to bfloat16
ATTN_INLINE Vf rounded_to_bf16(Vf x) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v))), 16))};
}
// 32 numbers in a row
ATTN_INLINE Pairs load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
// the first n of them, the others 0 and not read
ATTN_INLINE Pairs load_pairs(const bf16* p, int64_t n) {
  return {_mm512_maskz_loadu_epi16(n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1, p)};
}
// a, b <- the numbers of both that `first` and first + 8 say
ATTN_INLINE void permute_both(Vf& a, Vf& b, __m512i first) {
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const __m512 low = a.v, high = b.v;
  a.v = _mm512_permutex2var_ps(low, first, high);
  b.v = _mm512_permutex2var_ps(low, second, high);
}
// Numbers of a and b side by side, in an order that `in_order` undoes for what is computed of them in two halves.
ATTN_INLINE void zip_rows(Pairs a, Pairs b, Pairs& some, Pairs& others) {
  some.v = _mm512_unpacklo_epi16(a.v, b.v);  // columns 0-3 of each eight
  others.v = _mm512_unpackhi_epi16(a.v, b.v);
}
ATTN_INLINE void in_order(Vf& some, Vf& others) {
  permute_both(some, others, _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
}

// ---- numbers in parts (kernels/common/parts.h): float32 numbers whose upper 16 bits are a bfloat16

// half of the last digit of those bits added: what is then cut off makes it the nearest
ATTN_INLINE Vf raised_half(Vf x) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x8000)))};
}
ATTN_INLINE Vf upper_bits(Vf x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(int(0xffff0000))))};
}
// the upper halves of low and high side by side
ATTN_INLINE Pairs join_upper(Vf low, Vf high) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000)), shifted = _mm512_srli_epi32(_mm512_castps_si512(low.v), 16);
  return {_mm512_ternarylogic_epi32(shifted, _mm512_castps_si512(high.v), upper, 0xf8)};  // a | (b & c)
}
ATTN_INLINE Vf rounded_to_f16(Vf x) {
  return {_mm512_cvtph_ps(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}
// both rounded to float16, side by side; too large a number becomes inf, a small one subnormal
ATTN_INLINE Pairs join_halves(Vf low, Vf high) {
  const auto rounded = [](Vf x) __attribute__((always_inline)) {
    return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  };
  return {_mm512_or_si512(rounded(low), _mm512_slli_epi32(rounded(high), 16))};
}
// the lower halves
ATTN_INLINE Pairs join_lower(Pairs low, Pairs high) {
  const __m512i lower = _mm512_set1_epi32(0xffff), shifted = _mm512_slli_epi32(high.v, 16);
  return {_mm512_ternarylogic_epi32(shifted, low.v, lower, 0xf8)};
}
ATTN_INLINE Vf as_numbers(Pairs a) { return {_mm512_castsi512_ps(a.v)}; }  // its bits
// a[0], b[0], a[1], b[1] .. in a, then in b
ATTN_INLINE void interleave(Vf& a, Vf& b) {
  permute_both(a, b, _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
}
ATTN_INLINE void store_upper(bf16* p, Vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x.v), 16)));
}
// the bits of the largest |x| and of the smallest that is not 0
class SizesSeen {
 public:
  ATTN_INLINE void see(Vf x) {
    const __m512i size = _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff));
    largest_ = _mm512_max_epu32(largest_, size);
    smallest_ = _mm512_min_epu32(smallest_, _mm512_sub_epi32(size, _mm512_set1_epi32(1)));  // 0 becomes the largest
  }
  uint32_t largest() const { return _mm512_reduce_max_epu32(largest_); }
  uint32_t smallest() const {
    const uint32_t less = _mm512_reduce_min_epu32(smallest_);
    return less == 0xffffffff ? less : less + 1;
  }

 private:
  __m512i largest_ = _mm512_setzero_si512(), smallest_ = _mm512_set1_epi32(-1);
};
ATTN_INLINE Pairs largest_halves(Pairs seen, Pairs x) {  // of bfloat16 numbers
  return {_mm512_max_epu16(seen.v, _mm512_and_si512(x.v, _mm512_set1_epi16(0x7fff)))};
}
ATTN_INLINE uint32_t largest_of_halves(Pairs seen) {
  const __m512i low = _mm512_and_si512(seen.v, _mm512_set1_epi32(0xffff)), high = _mm512_srli_epi32(seen.v, 16);
  return _mm512_reduce_max_epu32(_mm512_max_epu32(low, high));
}

}  // namespace
}  // namespace attnjourney
