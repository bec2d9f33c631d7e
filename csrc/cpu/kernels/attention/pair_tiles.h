// Tiles of bfloat16 pairs: their sizes, products of weights with values, packing, dropout.
#pragma once
#include "cpu/kernels/common/dropout_tile.h"
#include "cpu/kernels/common/pack.h"
#include "forward_tile.h"

namespace attnjourney {
namespace {

struct PairTiles {
  static constexpr int width = Vf::width;
  static constexpr int rows = Tuning::rows, vectors = Tuning::vectors;  // rows even: keys go in pairs
  static constexpr int64_t panel = vectors * width, tile = Tuning::forward_panels * panel;
  static_assert(rows % 2 == 0);
  using Output = OutputTile<float, bf16>;

  // in whole pairs: keys taken in at the ends are hidden by their range
  static ATTN_INLINE TileKeys whole_pairs(TileKeys seen) {
    seen.begin &= ~int64_t(1);
    seen.all_begin = min_of(seen.end, (seen.all_begin + 1) & ~int64_t(1));
    seen.all_end = max_of(seen.all_begin, seen.all_end == seen.end ? seen.end : seen.all_end & ~int64_t(1));
    return seen;
  }
  // n pairs of keys: weights [pair][tile], from the row in question on, and values [pair][ld of the output]
  struct WeightedValues {
    const uint32_t *weights, *values;
    int64_t n;
  };
  template <int M, int N>
  static ATTN_INLINE void add_weighted(Tile<float, M, N>& sums, const WeightedValues& term, int64_t ld, int64_t d) {
    _Pragma("GCC unroll 2") for (int64_t k = 0; k < term.n; k++) {
      Pairs values[N];
      ATTN_UNROLL for (int j = 0; j < N; j++) values[j] = load_pairs(term.values + k * ld + d + width * j);
      ATTN_UNROLL for (int i = 0; i < M; i++) {
        const PairForAll weight = broadcast_pair(term.weights + k * tile + i);
        ATTN_UNROLL for (int j = 0; j < N; j++) sums.acc[i][j] = dot_pairs(sums.acc[i][j], weight, values[j]);
      }
    }
  }
  // M rows of the tile from r on: the sum of all terms (WeightedValues)
  template <int M, class... Terms>
  static ATTN_NOINLINE void value_rows(const Output& output, int64_t r, const Terms&... terms) {
    split_columns<float, vectors>(output.columns, [&](int64_t d, auto n) {
      Tile<float, M, n.count> sums;
      sums.clear();
      (add_weighted(sums, terms, output.ld, d), ...);
      output.put(sums, r, d);
    });
  }
  // the same for `count` rows where a value is an inf or a NaN: a weight of exactly 0 hides it
  static ATTN_NOINLINE void value_rows_guarded(const WeightedValues& term, int64_t count, const Output& output) {
    for (int64_t r = 0; r < count; r++)
      for (int64_t k = 0; k < 2 * term.n; k++) {
        const auto half = [&](uint32_t pair) { return k & 1 ? pair & 0xffff0000u : pair << 16; };
        const uint32_t weight = half(term.weights[k / 2 * tile + r]);
        if (weight << 1 == 0) continue;
        for (int64_t d = 0; d < output.columns; d++)
          output.sums[r * output.ld + d] += bits_float(weight) * bits_float(half(term.values[k / 2 * output.ld + d]));
      }
  }

  // rows 2k, 2k + 1 of X side by side; a last single row is paired with zeros. Tells whether every number is finite.
  static ATTN_NOINLINE bool zip_rows(const bf16* X, int64_t ld, int64_t n, int64_t columns, uint32_t* pairs,
                                     int64_t pairs_ld) {
    const bf16 zeros[width] = {};
    bool finite = true;
    for (int64_t k = 0; 2 * k < n; k++) {
      const bf16 *low = X + 2 * k * ld, *high = 2 * k + 1 < n ? low + ld : nullptr;
      const auto put = [&](const bf16* a, const bf16* b, int64_t d) {
        const Pairs zipped = zip(a, b);
        finite = finite && all_finite(zipped);
        store_pairs(pairs + k * pairs_ld + d, zipped);
      };
      int64_t d = 0;
      for (; d + width <= columns; d += width) put(low + d, high ? high + d : zeros, d);
      if (d == columns) continue;
      bf16 tail[2][width] = {};
      memcpy(tail[0], low + d, size_t(columns - d) * 2);
      if (high) memcpy(tail[1], high + d, size_t(columns - d) * 2);
      put(tail[0], tail[1], d);
    }
    return finite;
  }
  // n rows of `columns` numbers, padded with zeros to `to_ld`
  static ATTN_NOINLINE void copy_rows(const bf16* from, int64_t ld, int64_t n, int64_t columns, bf16* to,
                                      int64_t to_ld) {
    for (int64_t k = 0; k < n; k++) {
      memcpy(to + k * to_ld, from + k * ld, size_t(columns) * 2);
      for (int64_t d = columns; d < to_ld; d++) to[k * to_ld + d].bits = 0;
    }
  }
  // Rows of X, transposed into panels [pairs][panel] of Y. Rows of odd length or odd stride go by way of `copy`.
  static ATTN_INLINE void pack_panels(const bf16* X, int64_t ld, int64_t n, int64_t columns, bf16* copy,
                                      int64_t copy_ld, uint32_t* Y) {
    const int64_t pairs = (columns + 1) / 2;
    if (columns % 2 || ld % 2) {
      copy_rows(X, ld, n, columns, copy, copy_ld);
      X = copy;
      ld = copy_ld;
    }
    pack_transposed(reinterpret_cast<const float*>(X), ld / 2, n, pairs, Unchanged{}, reinterpret_cast<float*>(Y),
                    panel, panel * pairs, panel);
  }
  // Dropout on weights of pairs of keys, and on what else has their shape
  static ATTN_NOINLINE void drop(const Dropout& dropout, uint32_t head, const QueryTile& rows, int64_t k0,
                                 const TileKeys& seen, uint32_t* weights, uint32_t* also = nullptr) {
    for (int64_t octet = seen.begin & ~int64_t(7); octet < seen.end; octet += 8)
      for (int64_t i = 0; i < rows.count; i += width) {
        Lanes word[4];
        dropout_words(dropout, head, rows.first + i, k0 + octet, word);
        ATTN_UNROLL for (int e = 0; e < 4; e++) {
          const int64_t k = octet + 2 * e;
          if (k < seen.begin || k >= seen.end) continue;
          const auto keep = [&](uint32_t* x) { store_pairs(x, keep_pairs(word[e], dropout.threshold, load_pairs(x))); };
          keep(weights + k / 2 * tile + i);
          if (also) keep(also + k / 2 * tile + i);
        }
      }
  }
};

}  // namespace
}  // namespace attnjourney
