// The products of row_products.h for eight rows, by pairs of bfloat16 numbers: queries and keys as they lie in memory,
// two keys' values next to two keys' weights. For a Vec with Pairs.
#pragma once
#include "cpu/kernels/decode/line_prefetch.h"

namespace attnjourney {
namespace {

struct RowPairProducts {
  static constexpr bool on = true;
  static constexpr int rows = 8, width = Vf::width, lanes = 2 * width;

  static ATTN_INLINE Vf rounded(Vf x) { return rounded_to_bf16(x); }

  // S[k][8] = factor * q . key; rows of q are padded with zeros to a multiple of lanes
  static ATTN_NOINLINE void scores(const bf16* q, int64_t qd, const bf16* key, int64_t k_row, int64_t dim, int64_t n,
                                   float factor, float* S, LinePrefetch& prefetch) {
    constexpr int K = 2;
    const int64_t whole = dim / lanes * lanes;
    for (int64_t k = 0; k < n; k += K, key += K * k_row) {
      const bf16* const second = k + 1 < n ? key + k_row : key;
      Vf a[K * rows];
      ATTN_UNROLL for (int i = 0; i < K * rows; i++) a[i] = Vf::zero();
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
      ATTN_UNROLL for (int i = 0; i < K * rows; i += width) {
        Vf group[width];
        ATTN_UNROLL for (int j = 0; j < width; j++) group[j] = a[i + j];
        store(S + k * rows + i, Vf::set(factor) * sums(group));
      }
    }
  }

  // O[8][ldo] += P^T value for the weights P[n][8], which are bfloat16 numbers; pairs: room for half of P
  static ATTN_NOINLINE void weighted_values(const float* P, int64_t n, const bf16* value, int64_t v_row, int64_t dim,
                                            float* O, int64_t ldo, float* pairs, LinePrefetch& prefetch) {
    uint32_t* const w = reinterpret_cast<uint32_t*>(pairs);
    for (int64_t k = 0; k < n; k += 2) ATTN_UNROLL for (int r = 0; r < rows; r++) {
        const uint32_t second = k + 1 < n ? float_bits(P[(k + 1) * rows + r]) : 0;
        w[k / 2 * rows + r] = float_bits(P[k * rows + r]) >> 16 | second;
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
    Vf some[rows], others[rows];
    ATTN_UNROLL for (int r = 0; r < rows; r++) some[r] = others[r] = Vf::zero();
    for (int64_t k = 0; k < n; k += 2, w += rows) {
      if (k % 8 == 0) prefetch.step(2 * 8);
      Pairs x, y;
      zip_rows(row(k), k + 1 < n ? row(k + 1) : Pairs{}, x, y);
      ATTN_UNROLL for (int r = 0; r < rows; r++) {
        const PairForAll weight = broadcast_pair(w + r);
        some[r] = dot_pairs(some[r], weight, x);
        others[r] = dot_pairs(others[r], weight, y);
      }
    }
    ATTN_UNROLL for (int r = 0; r < rows; r++) {
      float* const o = O + r * ldo;
      in_order(some[r], others[r]);
      store(o, load(o) + some[r]);
      store(o + width, load(o + width) + others[r]);
    }
  }
};

}  // namespace
}  // namespace attnjourney
