// Products of bfloat16 pairs with lanes over queries, and what becomes of them: a group of keys at a time, the weights
// of a group computed between the products of the next, for the two need different units of the processor.
#pragma once
#include "dot_tiles.h"

namespace attnjourney {
namespace {

// X[key][2 pairs] times panels Y[pairs][panel]
struct DotProduct {
  const bf16* X;
  int64_t ld;
  const uint32_t* Y;
};

// A query tile against a key block, as the epilogues of the kernels extend it.
struct DotWork {
  int64_t pairs, vectors_used;
  const KeyRanges* keys;
  int64_t first_row, k0;
  float cap;  // softcap in log2 units, 0 for none
  Alibi<float> alibi;
  Ahead* ahead;  // of the mask
};

// Products on their way to weights, [key pair][vector][low, high][W], keys [begin, end) of the block.
struct Pending {
  const float *x, *a;  // of the last term; of those before it
  float* sums;         // [vector][2][W], for the epilogue
  int64_t begin, end, key;
  int vector, left;  // pairs of vectors
};

// E, the epilogue, is a DotWork with
//   DotProduct terms[most]; int count;     all but the last are summed up apart from it
//   clear(at)                              a pair of vectors that nothing sees
//   weigh<H>(pending, lane)                one pair of vectors: two keys for W queries
//   soften(x, a, vectors)                  softcap, where it is not part of weigh
//   load_scores(t, lane0, k)               with E::matrix, in place of products: scores from a matrix unit
template <class E>
struct DotStream : DotTiles {
  template <Hidden H, int N>
  static ATTN_INLINE void weigh(Pending& w, const E& e, int64_t lane0) {
    e.template weigh<H>(w, lane0 + W * w.vector);
    w.x += 2 * W;
    if constexpr (E::most > 1) w.a += 2 * W;
    w.left--;
    if (++w.vector == N) w.vector = 0, w.key += 2;
  }
  // what is left of them; a copy, so that the original can stay in registers
  template <Hidden H, int N>
  static ATTN_NOINLINE void finish(Pending w, const E& e, int64_t lane0) {
    while (w.left > 0) weigh<H, N>(w, e, lane0);
  }

  template <int M, int N>
  static ATTN_INLINE void clear(Vf (&t)[M][N]) {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) t[r][j] = Vf::zero();
  }
  template <int M, int N>
  static ATTN_INLINE void spill(const Vf (&t)[M][N], float* to) {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
        store(to + ((r / 2 * N + j) * 2 + r % 2) * W, t[r][j]);
  }
  template <int M, int N>
  static ATTN_INLINE void add_product(Vf (&t)[M][N], const bf16* X, int64_t ld, const uint32_t* Y) {
    Pairs y[N];
    ATTN_UNROLL for (int j = 0; j < N; j++) y[j] = load_pairs(Y + W * j);
    ATTN_UNROLL for (int r = 0; r < M; r++) {
      const Pairs b = broadcast_pair(X + r * ld);
      ATTN_UNROLL for (int j = 0; j < N; j++) t[r][j] = dot(t[r][j], b, y[j]);
    }
  }

  // n groups of M keys, from key k of the block on, against N vectors from lane0 on
  template <Hidden H, int M, int N>
  static ATTN_NOINLINE void stream(const E& e, int64_t lane0, int64_t k, int64_t n) {
    constexpr int numbers = (M + 1) / 2 * 2 * N * W;
    alignas(64) float x[numbers], a[E::most > 1 ? numbers : 1], sums[E::most > 1 ? 2 * N * W : 1];
    if constexpr (M % 2) memset(x, 0, sizeof x);
    if constexpr (E::most > 1) memset(a, 0, sizeof a);
    const int64_t panel_at = lane0 / panel * panel * e.pairs + lane0 % panel;
    Pending pending{x, a, sums, k, k, k, 0, 0};
    for (int64_t i = 0; i < n; i++, k += M) {
      Vf t[M][N];
      if constexpr (E::matrix) {
        e.load_scores(t, lane0, k);
      } else {
        clear(t);
        for (int c = 0; c < e.count; c++) {
          if (E::most > 1 && c > 0 && c == e.count - 1) {
            if (pending.left > 0) finish<H, N>(pending, e, lane0), pending.left = 0;
            spill(t, a);
            clear(t);
          }
          const DotProduct term = e.terms[c];
          const bf16* X = term.X + k * term.ld;
          const uint32_t* Y = term.Y + panel_at;
          int64_t at = 0;
          for (; at + 2 <= e.pairs && pending.left > 0; at += 2) {
            add_product(t, X + 2 * at, term.ld, Y + at * panel);
            add_product(t, X + 2 * at + 2, term.ld, Y + at * panel + panel);
            weigh<H, N>(pending, e, lane0);
          }
          _Pragma("GCC unroll 2") for (; at < e.pairs; at++) add_product(t, X + 2 * at, term.ld, Y + at * panel);
        }
      }
      if (pending.left > 0) finish<H, N>(pending, e, lane0);
      spill(t, x);
      if constexpr (E::softens)
        if (e.cap != 0) [[unlikely]]
          e.soften(x, a, numbers / W);
      pending = {x, a, sums, k, k + M, k, 0, (M + 1) / 2 * N};
      if constexpr (H == Hidden::by_bias || H == Hidden::by_sum) e.ahead->step();
    }
    finish<H, N>(pending, e, lane0);
  }

  // m keys, of which some may be hidden, against n vectors
  static ATTN_NOINLINE void some_keys(const E& e, int64_t lane0, int64_t n, int64_t k, int64_t m, bool bias) {
    with_rows<vectors>(n, [&](auto n_) {
      with_rows<rows>(m, [&](auto m_) {
        if (bias)
          stream<Hidden::by_bias, m_.count, n_.count>(e, lane0, k, 1);
        else
          stream<Hidden::by_range, m_.count, n_.count>(e, lane0, k, 1);
      });
    });
  }
  // keys [begin, end) of the block, seen by every row but for the bias block
  template <Hidden H>
  static ATTN_NOINLINE void inner(const E& e, int64_t begin, int64_t end) {
    const int64_t n = (end - begin) / rows, rest = begin + n * rows;
    for (int64_t v = 0; v < e.vectors_used; v += vectors) {
      const int64_t used = min_of(vectors, e.vectors_used - v);
      if (n) with_rows<vectors>(used, [&](auto n_) { stream<H, rows, n_.count>(e, v * W, begin, n); });
      if (rest < end) some_keys(e, v * W, used, rest, end - rest, H == Hidden::by_bias || H == Hidden::by_sum);
    }
  }
  // keys [begin, end) of the block, seen by some rows only: vectors of rows that see none of a group are skipped
  static ATTN_NOINLINE void border(const E& e, int64_t begin, int64_t end, int64_t rows_used, bool bias) {
    for (int64_t k = begin; k < end; k += rows) {
      const int64_t m = min_of(rows, end - k);
      for (int64_t v = 0; v < e.vectors_used; v += vectors) {
        const int64_t lane0 = v * W, used = min_of(rows_used - lane0, panel);
        const SeenLanes lanes = seen_lanes<W>(*e.keys, e.first_row + lane0, used, e.k0 + k, m);
        for (int64_t r = 0; r < m; r += 2)
          for (int64_t j = 0; j < vectors; j++)
            if (j < lanes.begin || j >= lanes.end) e.clear((k + r) / 2 * tile + lane0 + W * j);
        const int64_t n = lanes.end - lanes.begin, at = lane0 + lanes.begin * W;
        if (n <= 0) continue;
        if (!lanes.whole || m < rows || bias)
          some_keys(e, at, n, k, m, bias);
        else
          with_hidden(e.alibi.on ? Hidden::by_alibi : Hidden::no, [&](auto hidden) {
            with_rows<vectors>(n, [&](auto n_) { stream<hidden.value, rows, n_.count>(e, at, k, 1); });
          });
      }
    }
  }
  // all keys of `seen`
  static ATTN_INLINE void all(const E& e, const TileKeys& seen, int64_t rows_used, MaskBlock masked) {
    const bool bias = has_block(masked);
    border(e, seen.begin, seen.all_begin, rows_used, bias);
    with_hidden(inside(masked), [&](auto hidden) { inner<hidden.value>(e, seen.all_begin, seen.all_end); });
    border(e, seen.all_end, seen.end, rows_used, bias);
  }
};

}  // namespace
}  // namespace attnjourney
