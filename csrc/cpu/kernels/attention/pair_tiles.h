// Tiles of bfloat16 pairs: their sizes, products of weights with values, packing, dropout.
#pragma once
#include "forward.h"
#include "matrix_products.h"

namespace attnjourney {
namespace {

struct DotTiles {
  static constexpr int W = Vf::width;
  static constexpr int rows = Tuning::rows, vectors = Tuning::vectors;  // rows even: keys go in pairs
  static constexpr int64_t panel = vectors * W, tile = Tuning::forward_panels * panel;
  static constexpr int64_t key_block = Tuning::dot_forward_keys, tiles = Tuning::forward_tiles;
  static_assert(rows % 2 == 0 && key_block % 2 == 0);
  // MatrixUnit comes from the instruction set; groups of keys go through it
  static constexpr bool matrix = MatrixUnit::on;
  using Matrix = MatrixProducts<MatrixUnit>;
  static constexpr int64_t group = Matrix::keys;
  static_assert(!matrix ||
                (W == Matrix::side && vectors == Matrix::columns && tile == panel && key_block % group == 0));
  static constexpr int64_t dim_step = matrix ? 2 * Matrix::side : 2;  // head_dim is padded to it

  // in whole pairs: keys taken in at the ends are hidden by their range
  static ATTN_INLINE TileKeys whole_pairs(TileKeys seen) {
    seen.begin &= ~int64_t(1);
    seen.all_begin = min_of(seen.end, (seen.all_begin + 1) & ~int64_t(1));
    seen.all_end = max_of(seen.all_begin, seen.all_end == seen.end ? seen.end : seen.all_end & ~int64_t(1));
    return seen;
  }
  struct Values {
    int64_t ldv, columns;  // columns a multiple of W
    float* O;              // [tile][ldv]
    bool first;
    bf16* out;  // normalised rows go here, or null
    int64_t ldout;
    const float* inverse;
  };
  // n pairs of keys: weights [pair][tile], from the row in question on, and values [pair][ldv]
  struct Weighted {
    const uint32_t *P, *V;
    int64_t n;
  };
  template <int M, int N>
  static ATTN_INLINE void add_weighted(Tile<float, M, N>& t, const Weighted& w, int64_t ldv, int64_t d) {
    _Pragma("GCC unroll 2") for (int64_t x = 0; x < w.n; x++) {
      Pairs b[N];
      ATTN_UNROLL for (int j = 0; j < N; j++) b[j] = load_pairs(w.V + x * ldv + d + W * j);
      ATTN_UNROLL for (int i = 0; i < M; i++) {
        const Pairs p = broadcast_pair(w.P + x * tile + i);
        ATTN_UNROLL for (int j = 0; j < N; j++) t.a[i][j] = dot(t.a[i][j], p, b[j]);
      }
    }
  }
  // M rows of the tile from r on: the sum of all terms (Weighted)
  template <int M, class... Terms>
  static ATTN_NOINLINE void value_rows(const Values& v, int64_t r, const Terms&... terms) {
    split_columns<float, vectors>(v.columns, [&](int64_t d, auto n_) {
      Tile<float, M, n_.count> t;
      t.clear();
      (add_weighted(t, terms, v.ldv, d), ...);
      float* O = v.O + r * v.ldv + d;
      if (!v.first) t.add(O, v.ldv);
      if (!v.out) return t.store_to(O, v.ldv);
      ATTN_UNROLL for (int i = 0; i < M; i++) {
        const Vf inverse = Vf::broadcast(v.inverse + r + i);
        ATTN_UNROLL for (int j = 0; j < n_.count; j++)
            store(v.out + (r + i) * v.ldout + d + W * j, inverse * t.a[i][j]);
      }
    });
  }
  // n rows of the tile times all pairs, on the matrix unit; `space`: matrix_space numbers
  static constexpr int64_t matrix_space = matrix ? tile * (key_block / 2 + 2 * Matrix::side) : 0;
  template <class Products>
  static ATTN_NOINLINE void value_matrix(const uint32_t* P, const uint32_t* V, int64_t pairs, const Values& v,
                                         int64_t n, uint32_t* space) {
    const int64_t groups = (n + Products::side - 1) / Products::side;
    Products::transpose_weights(P, tile, pairs, groups, space);
    float* C = reinterpret_cast<float*>(space + tile * key_block / 2);
    with_rows<Products::columns>(groups, [&](auto g) {
      for (int64_t d = 0; d < v.columns; d += 2 * W)
        with_rows<2>((v.columns - d) / W, [&](auto m) {
          Products::template values<g.count, m.count>(space, V + d, v.ldv, pairs, C);
          for (int64_t i = 0; i < n; i++) ATTN_UNROLL for (int j = 0; j < m.count; j++) {
              const int64_t at = i * v.ldv + d + W * j;
              Vf x = load(C + (i * m.count + j) * W);
              if (!v.first) x = x + load(v.O + at);
              if (v.out)
                store(v.out + i * v.ldout + d + W * j, Vf::broadcast(v.inverse + i) * x);
              else
                store(v.O + at, x);
            }
        });
    });
  }
  // the same where V holds an inf or a NaN: a weight of exactly 0 hides it
  static ATTN_NOINLINE void value_guarded(const uint32_t* P, const uint32_t* V, int64_t n, int64_t count,
                                          const Values& v) {
    for (int64_t r = 0; r < count; r++)
      for (int64_t x = 0; x < 2 * n; x++) {
        const uint32_t pair = P[x / 2 * tile + r], half = x & 1 ? pair & 0xffff0000u : pair << 16;
        if (half << 1 == 0) continue;
        for (int64_t d = 0; d < v.columns; d++) {
          const uint32_t value = V[x / 2 * v.ldv + d];
          v.O[r * v.ldv + d] += bits_float(half) * bits_float(x & 1 ? value & 0xffff0000u : value << 16);
        }
      }
  }

  // keys 2x, 2x + 1 of V side by side; a last single key is paired with zeros. Tells whether every number is finite.
  static ATTN_NOINLINE bool zip_values(const bf16* V, int64_t ld, int64_t n, int64_t columns, uint32_t* Y,
                                       int64_t ldy) {
    const bf16 zeros[W] = {};
    bool finite = true;
    for (int64_t x = 0; 2 * x < n; x++) {
      const bf16 *a = V + 2 * x * ld, *b = 2 * x + 1 < n ? a + ld : nullptr;
      int64_t d = 0;
      for (; d + W <= columns; d += W) {
        const Pairs p = zip(a + d, b ? b + d : zeros);
        finite = finite && all_finite(p);
        store_pairs(Y + x * ldy + d, p);
      }
      if (d == columns) continue;
      bf16 tail[2][W] = {};
      memcpy(tail[0], a + d, size_t(columns - d) * 2);
      if (b) memcpy(tail[1], b + d, size_t(columns - d) * 2);
      const Pairs p = zip(tail[0], tail[1]);
      finite = finite && all_finite(p);
      store_pairs(Y + x * ldy + d, p);
    }
    return finite;
  }
  // rows padded to an even length with 0
  static ATTN_NOINLINE void copy_rows(const bf16* X, int64_t ld, int64_t n, int64_t columns, bf16* Y, int64_t ldy) {
    for (int64_t k = 0; k < n; k++) {
      memcpy(Y + k * ldy, X + k * ld, size_t(columns) * 2);
      for (int64_t d = columns; d < ldy; d++) Y[k * ldy + d].bits = 0;
    }
  }
  static ATTN_NOINLINE void drop(const Dropout& dropout, uint32_t head, int64_t first_row, int64_t count, int64_t k0,
                                 int64_t begin, int64_t end, uint32_t* P, uint32_t* also = nullptr) {
    for (int64_t k8 = begin & ~int64_t(7); k8 < end; k8 += 8)
      for (int64_t i = 0; i < count; i += W) {
        Lanes word[4];
        philox_lanes(dropout.seed, head, uint32_t(first_row + i), uint32_t((k0 + k8) >> 3), word);
        ATTN_UNROLL for (int e = 0; e < 4; e++) {
          const int64_t k = k8 + 2 * e;
          if (k < begin || k >= end) continue;
          uint32_t* x = P + k / 2 * tile + i;
          store_pairs(x, keep_pairs(word[e], dropout.threshold, load_pairs(x)));
          if (!also) continue;
          uint32_t* y = also + k / 2 * tile + i;
          store_pairs(y, keep_pairs(word[e], dropout.threshold, load_pairs(y)));
        }
      }
  }
};

}  // namespace
}  // namespace attnjourney
