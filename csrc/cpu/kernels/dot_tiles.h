// The products of attention_forward_dot.h and the weights between them, a tile of registers at a time; with a matrix
// unit both products run there (matrix_products.h).
#pragma once
#include "attention_forward.h"
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

  struct Scores {
    const uint32_t* query;      // panels [head_dim / 2][panel]
    const float* reference;     // [tile], log2 units, negated
    const float* bias;          // [key][tile]
    uint32_t* P;                // [key / 2][tile]
    Vf *top, *total, *rounded;  // running maximum relative to the reference, sum, sum of the rounded weights
    Vf scale;                   // scale * log2(e)
    int64_t pairs, vectors_used;
    const KeyRanges* keys;
    int64_t first_row;
    Vf factor;  // query_factor, and
    float cap;  // softcap in log2 units; 0 for none, and else scale is 1
    Alibi<float> alibi;
    float* S = nullptr;  // of the matrix unit: [group][tile], scores of the keys from `S_key` on
    int64_t S_key = 0;
  };

  // calls f over the keys [begin, end) of the block: all at once, or by groups whose scores the matrix unit computes
  template <class F>
  static ATTN_INLINE void by_groups(const bf16* K, int64_t ldk, Scores& s, int64_t begin, int64_t end, const F& f) {
    if constexpr (matrix) {
      for (int64_t k = begin; k < end; k = s.S_key + group) {
        const int64_t key = k / group * group;
        if (s.S_key != key)
          with_rows<vectors>(s.vectors_used, [&](auto n) {
            Matrix::template scores<n.count>(K + key * ldk, ldk, s.query, s.pairs, s.S, tile);
          });
        s.S_key = key;
        f(k, min_of(end, key + group));
      }
    } else {
      f(begin, end);
    }
  }

  // M keys (the first one at an even place) against N vectors from lane0 on; a last single key is paired with weight 0
  template <Hidden H, int M, int N>
  static ATTN_INLINE void score_tile(const bf16* K, int64_t ldk, const Scores& s, int64_t lane0, int64_t key,
                                     int64_t k) {
    Vf a[M][N];
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = Vf::zero();
    const uint32_t* Q = s.query + lane0 / panel * panel * s.pairs + lane0 % panel;
    if constexpr (matrix)
      ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] =
          load(s.S + (k - s.S_key + r) * tile + lane0 + W * j);
    else
      _Pragma("GCC unroll 2") for (int64_t x = 0; x < s.pairs; x++) {
        Pairs q[N];
        ATTN_UNROLL for (int j = 0; j < N; j++) q[j] = load_pairs(Q + x * panel + W * j);
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          const Pairs b = broadcast_pair(K + r * ldk + 2 * x);
          ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = dot(a[r][j], b, q[j]);
        }
      }
    if (s.cap != 0) [[unlikely]] {
      alignas(64) float x[M * N * W];
      ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
          store(x + (r * N + j) * W, a[r][j] * s.factor);
      cap_scores(x, M * N, s.cap);
      ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] =
          load(x + (r * N + j) * W);
    }
    LaneRange<float> range[M];
    if constexpr (H == Hidden::by_range)
      for (int r = 0; r < M; r++) range[r] = lane_range<float>(*s.keys, s.first_row + lane0, key + r);
    const Vf hidden = Vf::set(-__builtin_inff());
    ATTN_UNROLL for (int j = 0; j < N; j++) {
      Vf top = s.top[lane0 / W + j], total = s.total[lane0 / W + j], rounded = s.rounded[lane0 / W + j];
      const Vf reference = load(s.reference + lane0 + W * j), lane = Vf::iota() + Vf::set(float(W * j));
      Vf distance = s.alibi.distance(lane, lane0, k);
      const auto weight = [&](int r) {
        // rounded twice, as the maximum that the reference came from: a fused sum would show the product's rounding
        Vf x = a[r][j] * s.scale + reference, w;
        if constexpr (H == Hidden::by_bias) {
          const Vf bias = load(s.bias + (k + r) * tile + lane0 + W * j);
          const auto gone = eq(bias, hidden);
          x = select(gone, hidden, x + bias);
          w = select(gone, Vf::zero(), exp2_short(x));
        } else if constexpr (H == Hidden::by_range) {
          const auto visible = range[r].visible(lane);
          if (s.alibi.on) x = s.alibi.add(x, distance);
          x = select(visible, x, hidden);
          w = select(visible, exp2_short(x), Vf::zero());
        } else {
          if constexpr (H == Hidden::by_sum) x = x + load(s.bias + (k + r) * tile + lane0 + W * j);
          if constexpr (H == Hidden::by_alibi) x = s.alibi.add(x, distance);
          w = exp2_short(x);
        }
        distance = distance - Vf::set(1.f);
        top = max(top, x);
        return w;
      };
      ATTN_UNROLL for (int r = 0; r < M; r += 2) {
        const Vf low = weight(r), high = r + 1 < M ? weight(r + 1) : Vf::zero();
        const Pairs w = round_pairs(low, high);
        total = total + (low + high);
        rounded = add_pairs(rounded, w);
        store_pairs(s.P + (k + r) / 2 * tile + lane0 + W * j, w);
      }
      s.top[lane0 / W + j] = top;
      s.total[lane0 / W + j] = total;
      s.rounded[lane0 / W + j] = rounded;
    }
  }

  // Scores of a tile on their way to weights, [key pair][vector][low, high][W].
  struct Pending {
    const float* x;
    uint32_t* P;
    int64_t key;       // of the block
    int vector, left;  // pairs of vectors
  };
  // one pair of vectors: two keys for W queries
  template <Hidden H, int N>
  static ATTN_INLINE void weigh(Pending& w, const Scores& s, int64_t lane0) {
    const int64_t j = lane0 / W + w.vector;
    const Vf reference = load(s.reference + lane0 + W * w.vector);
    // rounded twice, as in score_tile
    Vf x = load(w.x) * s.scale + reference, y = load(w.x + W) * s.scale + reference;
    if constexpr (H == Hidden::by_sum) {
      const float* bias = s.bias + w.key * tile + lane0 + W * w.vector;
      x = x + load(bias), y = y + load(bias + tile);
    }
    if constexpr (H == Hidden::by_alibi) {
      const Vf distance = s.alibi.distance(Vf::iota(), lane0 + W * w.vector, w.key);
      x = s.alibi.add(x, distance), y = s.alibi.add(y, distance - Vf::set(1.f));
    }
    const Vf low = exp2_short(x), high = exp2_short(y);
    const Pairs pair = round_pairs(low, high);
    s.top[j] = max(s.top[j], max(x, y));
    s.total[j] = s.total[j] + (low + high);
    s.rounded[j] = add_pairs(s.rounded[j], pair);
    store_pairs(w.P + W * w.vector, pair);
    w.x += 2 * W;
    w.left--;
    if (++w.vector == N) w.vector = 0, w.P += tile, w.key += 2;
  }
  // n tiles of `rows` keys, seen by every row: the weights of a tile are computed between the products of the next, for
  // the two need different units of the processor
  template <Hidden H, int N>
  static ATTN_NOINLINE void score_stream(const bf16* K, int64_t ldk, const Scores& s, int64_t lane0, int64_t k,
                                         int64_t n) {
    alignas(64) float x[rows * N * W];
    const uint32_t* Q = s.query + lane0 / panel * panel * s.pairs + lane0 % panel;
    Pending pending{x, s.P + k / 2 * tile + lane0, k, 0, 0};
    for (int64_t i = 0; i < n; i++, K += rows * ldk) {
      Vf a[rows][N];
      ATTN_UNROLL for (int r = 0; r < rows; r++) ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = Vf::zero();
      const auto products = [&](int64_t at) {
        Pairs q[N];
        ATTN_UNROLL for (int j = 0; j < N; j++) q[j] = load_pairs(Q + at * panel + W * j);
        ATTN_UNROLL for (int r = 0; r < rows; r++) {
          const Pairs b = broadcast_pair(K + r * ldk + 2 * at);
          ATTN_UNROLL for (int j = 0; j < N; j++) a[r][j] = dot(a[r][j], b, q[j]);
        }
      };
      int64_t at = 0;
      for (; at + 2 <= s.pairs && pending.left > 0; at += 2) {
        products(at);
        products(at + 1);
        weigh<H, N>(pending, s, lane0);
      }
      _Pragma("GCC unroll 2") for (; at < s.pairs; at++) products(at);
      while (pending.left > 0) weigh<H, N>(pending, s, lane0);
      pending.x = x;
      pending.left = rows / 2 * N;
      ATTN_UNROLL for (int r = 0; r < rows; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
          store(x + ((r / 2 * N + j) * 2 + r % 2) * W, a[r][j]);
    }
    while (pending.left > 0) weigh<H, N>(pending, s, lane0);
  }

  template <Hidden H, int M>
  static ATTN_NOINLINE void score_rows(const bf16* K, int64_t ldk, const Scores& s, int64_t key, int64_t k) {
    int64_t p = 0;
    for (; (p + 1) * vectors <= s.vectors_used; p++) score_tile<H, M, vectors>(K, ldk, s, p * panel, key, k);
    if (p * vectors < s.vectors_used)
      with_rows<vectors - 1>(s.vectors_used - p * vectors,
                             [&](auto n) { score_tile<H, M, n.count>(K, ldk, s, p * panel, key, k); });
  }
  template <Hidden H, int M>
  static ATTN_NOINLINE void score_some(const bf16* K, int64_t ldk, const Scores& s, int64_t lane0, int64_t n,
                                       int64_t key, int64_t k) {
    with_rows<vectors>(n, [&](auto n_) { score_tile<H, M, n_.count>(K, ldk, s, lane0, key, k); });
  }

  // calls f(first, Rows<m>) over [begin, end): `rows` at a time, then what is left; begin is even
  template <class F>
  static ATTN_INLINE void split_keys(int64_t begin, int64_t end, F&& f) {
    for (int64_t k = begin; k < end; k += rows) with_rows<rows>(end - k, [&](auto m) { f(k, m); });
  }
  template <Hidden H>
  static ATTN_NOINLINE void score_inner(const bf16* K, int64_t ldk, const Scores& s, int64_t k0, int64_t begin,
                                        int64_t end) {
    if (!matrix && H != Hidden::by_bias && s.cap == 0) {
      const int64_t n = (end - begin) / rows;
      for (int64_t v = 0; v < s.vectors_used; v += vectors)
        with_rows<vectors>(s.vectors_used - v,
                           [&](auto m) { score_stream<H, m.count>(K + begin * ldk, ldk, s, v * W, begin, n); });
      begin += n * rows;
    }
    split_keys(begin, end, [&](int64_t k, auto m) { score_rows<H, m.count>(K + k * ldk, ldk, s, k0 + k, k); });
  }
  static ATTN_NOINLINE void score_border(const bf16* K, int64_t ldk, const Scores& s, int64_t k0, int64_t begin,
                                         int64_t end, int64_t rows_used, bool bias) {
    split_keys(begin, end, [&](int64_t k, auto m) {
      const bf16* key = K + k * ldk;
      for (int64_t p = 0; p * vectors < s.vectors_used; p++) {
        const int64_t lane0 = p * panel, used = min_of(rows_used - lane0, panel);
        const SeenLanes lanes = seen_lanes<W>(*s.keys, s.first_row + lane0, used, k0 + k, m.count);
        for (int64_t r = 0; r < m.count; r += 2) {
          uint32_t* P = s.P + (k + r) / 2 * tile + lane0;
          for (int64_t j = 0; j < vectors; j++)
            if (j < lanes.begin || j >= lanes.end) store_pairs(P + W * j, Pairs{});
        }
        if (lanes.begin >= lanes.end) continue;
        const int64_t at = lane0 + lanes.begin * W, n = lanes.end - lanes.begin;
        if (bias)
          score_some<Hidden::by_bias, m.count>(key, ldk, s, at, n, k0 + k, k);
        else if (lanes.whole && !s.alibi.on)
          score_some<Hidden::no, m.count>(key, ldk, s, at, n, k0 + k, k);
        else
          score_some<Hidden::by_range, m.count>(key, ldk, s, at, n, k0 + k, k);
      }
    });
  }

  struct Values {
    int64_t ldv, columns;  // columns a multiple of W
    float* O;              // [tile][ldv]
    bool first;
    bf16* out;  // normalised rows go here, or null
    int64_t ldout;
    const float* inverse;
  };
  // M rows of the tile times n pairs of keys
  template <int M>
  static ATTN_NOINLINE void value_rows(const uint32_t* P, const uint32_t* V, int64_t n, const Values& v, int64_t r) {
    split_columns<float, vectors>(v.columns, [&](int64_t d, auto n_) {
      Tile<float, M, n_.count> t;
      t.clear();
      _Pragma("GCC unroll 2") for (int64_t x = 0; x < n; x++) {
        Pairs b[n_.count];
        ATTN_UNROLL for (int j = 0; j < n_.count; j++) b[j] = load_pairs(V + x * v.ldv + d + W * j);
        ATTN_UNROLL for (int i = 0; i < M; i++) {
          const Pairs w = broadcast_pair(P + x * tile + r + i);
          ATTN_UNROLL for (int j = 0; j < n_.count; j++) t.a[i][j] = dot(t.a[i][j], w, b[j]);
        }
      }
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
                                 int64_t begin, int64_t end, uint32_t* P) {
    for (int64_t k8 = begin & ~int64_t(7); k8 < end; k8 += 8)
      for (int64_t i = 0; i < count; i += W) {
        Lanes word[4];
        philox_lanes(dropout.seed, head, uint32_t(first_row + i), uint32_t((k0 + k8) >> 3), word);
        ATTN_UNROLL for (int e = 0; e < 4; e++) {
          const int64_t k = k8 + 2 * e;
          if (k < begin || k >= end) continue;
          uint32_t* x = P + k / 2 * tile + i;
          store_pairs(x, keep_pairs(word[e], dropout.threshold, load_pairs(x)));
        }
      }
  }
};

}  // namespace
}  // namespace attnjourney
