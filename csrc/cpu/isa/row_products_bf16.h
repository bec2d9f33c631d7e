// The products of row_products.h for eight rows, by pairs of bfloat16 numbers: queries and keys as they lie in memory,
// two keys' values next to two keys' weights.
#pragma once
#include "pairs_avx512_bf16.h"

// what follows is compiled for these
#include "cpu/kernels/decode/line_prefetch.h"

namespace attnjourney {
namespace {

// the first n of 32 numbers, the others 0 and not read
ATTN_INLINE Pairs load_pairs(const bf16* p, int64_t n) {
  return {_mm512_maskz_loadu_epi16(n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1, p)};
}
ATTN_INLINE Pairs load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }

struct RowPairProducts {
  static constexpr bool on = true;
  static constexpr int rows = 8, lanes = 32;

  static ATTN_INLINE Vf rounded(Vf x) {
    return {_mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v))), 16))};
  }

  // S[k][8] = factor * q . key; rows of q are padded with zeros to 32 numbers
  static ATTN_NOINLINE void scores(const bf16* q, int64_t qd, const bf16* key, int64_t k_row, int64_t dim, int64_t n,
                                   float factor, float* S, LinePrefetch& prefetch) {
    constexpr int K = 2;
    const int64_t whole = dim / lanes * lanes;
    for (int64_t k = 0; k < n; k += K, key += K * k_row) {
      const bf16* const second = k + 1 < n ? key + k_row : key;
      Vf a[16];
      ATTN_UNROLL for (int i = 0; i < 16; i++) a[i] = Vf::zero();
      const auto step = [&](int64_t d, Pairs x0, Pairs x1) __attribute__((always_inline)) {
        ATTN_UNROLL for (int r = 0; r < rows; r++) {
          const Pairs y = load_pairs(q + r * qd + d);
          a[r] = dot_pairs(a[r], y, x0);
          a[rows + r] = dot_pairs(a[rows + r], y, x1);
        }
      };
      prefetch.step(K * (dim / 16));
      for (int64_t d = 0; d < whole; d += lanes) step(d, load_pairs(key + d), load_pairs(second + d));
      if (whole < dim) step(whole, load_pairs(key + whole, dim - whole), load_pairs(second + whole, dim - whole));
      store(S + k * rows, Vf::set(factor) * sums(a));
    }
  }

  // O[8][ldo] += P^T value for the weights P[n][8], which are bfloat16 numbers; pairs: room for half of P
  static ATTN_NOINLINE void weighted_values(const float* P, int64_t n, const bf16* value, int64_t v_row, int64_t dim,
                                            float* O, int64_t ldo, float* pairs, LinePrefetch& prefetch) {
    uint32_t* const w = reinterpret_cast<uint32_t*>(pairs);
    for (int64_t k = 0; k < n; k += 2) {
      const __m256i a = _mm256_castps_si256(_mm256_loadu_ps(P + k * rows));
      const __m256i b = k + 1 < n ? _mm256_castps_si256(_mm256_loadu_ps(P + (k + 1) * rows)) : _mm256_setzero_si256();
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(w + k / 2 * rows), _mm256_or_si256(_mm256_srli_epi32(a, 16), b));
    }
    for (int64_t d = 0; d < dim; d += lanes) {
      const int64_t left = dim - d;
      if (left >= lanes)
        columns(
            w, n, [&](int64_t k) __attribute__((always_inline)) { return load_pairs(value + k * v_row + d); }, O + d,
            ldo, prefetch);
      else
        columns(
            w, n, [&](int64_t k) __attribute__((always_inline)) { return load_pairs(value + k * v_row + d, left); },
            O + d, ldo, prefetch);
    }
  }

 private:
  template <class F>
  static ATTN_INLINE void columns(const uint32_t* w, int64_t n, F&& row, float* O, int64_t ldo,
                                  LinePrefetch& prefetch) {
    Vf low[rows], high[rows];  // columns 0-3 and 4-7 of each eight
    ATTN_UNROLL for (int r = 0; r < rows; r++) low[r] = high[r] = Vf::zero();
    for (int64_t k = 0; k < n; k += 2, w += rows) {
      if (k % 8 == 0) prefetch.step(2 * 8);
      const __m512i a = row(k).v, b = k + 1 < n ? row(k + 1).v : _mm512_setzero_si512();
      const Pairs x{_mm512_unpacklo_epi16(a, b)}, y{_mm512_unpackhi_epi16(a, b)};
      ATTN_UNROLL for (int r = 0; r < rows; r++) {
        const Pairs s{_mm512_set1_epi32(int32_t(w[r]))};
        low[r] = dot_pairs(low[r], s, x);
        high[r] = dot_pairs(high[r], s, y);
      }
    }
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    ATTN_UNROLL for (int r = 0; r < rows; r++) {
      float* const o = O + r * ldo;
      store(o, load(o) + Vf{_mm512_permutex2var_ps(low[r].v, first, high[r].v)});
      store(o + 16, load(o + 16) + Vf{_mm512_permutex2var_ps(low[r].v, second, high[r].v)});
    }
  }
};

}  // namespace
}  // namespace attnjourney
