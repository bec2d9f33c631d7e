// Products of bfloat16 pairs with lanes over queries, and what becomes of them: a group of keys at a time, the weights
// of a group computed between the products of the next, for the two need different units of the processor.
#pragma once
#include "pair_tiles.h"

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
//   Queries, Cursor, cursor(lane, key, q)   what weigh keeps of W queries; where in it and in the result weigh is
//   weigh<H>(pending, scores, cursor)      one pair of vectors: two keys for W queries
//   soften(x, a, vectors)                  softcap, where it is not part of weigh
//   load_scores(t, lane0, k)               with E::matrix, in place of products: scores from a matrix unit
template <class E>
struct DotStream : DotTiles {
  template <Hidden H, int N>
  static ATTN_INLINE void weigh(Pending& w, typename E::Cursor& at, const E& e) {
    const Vf x[2] = {load(w.x), load(w.x + W)};
    e.template weigh<H>(w, x, at);
    w.x += 2 * W;
    if constexpr (E::most > 1) w.a += 2 * W;
    w.left--;
    at.next_vector();
    if (++w.vector == N) w.vector = 0, w.key += 2, at.next_keys(N);
  }
  // what is left of them; a copy, so that the original can stay in registers
  template <Hidden H, int N>
  static ATTN_NOINLINE void finish(Pending w, typename E::Cursor at, const E& e) {
    while (w.left > 0) weigh<H, N>(w, at, e);
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
    typename E::Cursor cursor;
    for (int64_t i = 0; i < n; i++, k += M) {
      Vf t[M][N];
      if constexpr (E::matrix) {
        e.load_scores(t, lane0, k);
      } else {
        clear(t);
        for (int c = 0; c < e.count; c++) {
          if (E::most > 1 && c > 0 && c == e.count - 1) {
            if (pending.left > 0) finish<H, N>(pending, cursor, e), pending.left = 0;
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
            weigh<H, N>(pending, cursor, e);
          }
          _Pragma("GCC unroll 2") for (; at < e.pairs; at++) add_product(t, X + 2 * at, term.ld, Y + at * panel);
        }
      }
      if (pending.left > 0) finish<H, N>(pending, cursor, e);
      spill(t, x);
      if constexpr (E::softens)
        if (e.cap != 0) [[unlikely]]
          e.soften(x, a, numbers / W);
      pending = {x, a, sums, k, k + M, k, 0, (M + 1) / 2 * N};
      cursor = e.cursor(lane0, k, e.queries + lane0 / W);
      if constexpr (H == Hidden::by_bias || H == Hidden::by_sum) e.ahead->step();
    }
    finish<H, N>(pending, cursor, e);
  }

  // a group of M keys, of which some may be hidden: weighed where it was computed
  template <Hidden H, int M, int N>
  static ATTN_NOINLINE void single(const E& e, int64_t lane0, int64_t k) {
    if (E::most > 1 || (E::softens && e.cap != 0)) return stream<H, M, N>(e, lane0, k, 1);
    Vf t[M][N];
    if constexpr (E::matrix) {
      e.load_scores(t, lane0, k);
    } else {
      clear(t);
      const DotProduct term = e.terms[0];
      const bf16* X = term.X + k * term.ld;
      const uint32_t* Y = term.Y + lane0 / panel * panel * e.pairs + lane0 % panel;
      _Pragma("GCC unroll 2") for (int64_t at = 0; at < e.pairs; at++)
          add_product(t, X + 2 * at, term.ld, Y + at * panel);
    }
    ATTN_UNROLL for (int j = 0; j < N; j++) {
      const int64_t lane = lane0 + W * j;
      typename E::Queries mine = e.queries[lane / W];
      ATTN_UNROLL for (int r = 0; r < M; r += 2) {
        const Vf x[2] = {t[r][j], r + 1 < M ? t[r + (r + 1 < M)][j] : Vf::zero()};
        e.template weigh<H>(Pending{nullptr, nullptr, nullptr, k, k + M, k + r, j, 0}, x, e.cursor(lane, k + r, &mine));
      }
      e.queries[lane / W] = mine;
    }
    if constexpr (H == Hidden::by_bias || H == Hidden::by_sum) e.ahead->step();
  }

  // what a vector of rows sees of a group of keys
  enum class Sight { none, some, whole };
  static ATTN_INLINE Sight sight_of(const TileKeys& seen, int64_t k, int64_t m) {
    if (k >= seen.end || k + m <= seen.begin) return Sight::none;
    return k >= seen.all_begin && k + m <= seen.all_end ? Sight::whole : Sight::some;
  }
  // whether every vector sees as much of the group at k as of that at `other`
  static ATTN_INLINE bool same_sight(const TileKeys (&seen)[vectors], int64_t k, int64_t other) {
    for (const TileKeys& x : seen)
      if (sight_of(x, k, rows) != sight_of(x, other, rows)) return false;
    return true;
  }
  template <int M, int N>
  static ATTN_INLINE void single(Hidden hidden, const E& e, int64_t lane0, int64_t k) {
    if (hidden == Hidden::by_bias) return single<Hidden::by_bias, M, N>(e, lane0, k);
    if constexpr (M % rows == 0) {
      if (hidden == Hidden::by_alibi) return single<Hidden::by_alibi, M, N>(e, lane0, k);
      if (hidden == Hidden::no) return single<Hidden::no, M, N>(e, lane0, k);
    }
    single<Hidden::by_range, M, N>(e, lane0, k);
  }
  // n groups of m keys against `used` vectors; n is 1 where m < rows
  static ATTN_NOINLINE void some_keys(Hidden hidden, const E& e, int64_t lane0, int64_t used, int64_t k, int64_t m,
                                      int64_t n) {
    for (; used == 1 && n > 1; n -= 2, k += 2 * rows) single<2 * rows, 1>(hidden, e, lane0, k);  // hides latencies
    for (; n > 0; n--, k += rows)
      with_rows<vectors>(used, [&](auto n_) {
        with_rows<rows>(m, [&](auto m_) { single<m_.count, n_.count>(hidden, e, lane0, k); });
      });
  }
  // keys [begin, end) of the block, seen by every row but for the bias block
  template <Hidden H>
  static ATTN_NOINLINE void inner(const E& e, int64_t begin, int64_t end) {
    const int64_t n = (end - begin) / rows, rest = begin + n * rows;
    for (int64_t v = 0; v < e.vectors_used; v += vectors) {
      const int64_t used = min_of(vectors, e.vectors_used - v);
      if (n) with_rows<vectors>(used, [&](auto n_) { stream<H, rows, n_.count>(e, v * W, begin, n); });
      if (rest < end)
        some_keys(H == Hidden::by_bias || H == Hidden::by_sum ? Hidden::by_bias : Hidden::by_range, e, v * W, used,
                  rest, end - rest, 1);
    }
  }
  // keys [begin, end) of the block, seen by some rows only: vectors of rows that see none of a group are skipped
  static ATTN_NOINLINE void border(const E& e, int64_t begin, int64_t end, int64_t rows_used, bool bias) {
    for (int64_t v = 0; v < e.vectors_used && begin < end; v += vectors) {
      TileKeys seen[vectors] = {};
      for (int64_t j = 0; j < vectors && v + j < e.vectors_used; j++) {
        const int64_t row = (v + j) * W;
        seen[j] = tile_keys(*e.keys, e.first_row + row, e.first_row + min_of(rows_used, row + W) - 1, e.k0, end);
      }
      for (int64_t k = begin, n; k < end; k += n * rows) {
        const int64_t m = min_of(rows, end - k);
        n = 1;
        while (k + (n + 1) * rows <= end && same_sight(seen, k, k + n * rows)) n++;
        for (int64_t j = 0, next; j < vectors; j = next) {
          const Sight sight = sight_of(seen[j], k, m);
          next = j + 1;
          while (next < vectors && sight_of(seen[next], k, m) == sight) next++;
          if (sight == Sight::none)
            for (int64_t r = 0; r < (n - 1) * rows + m; r += 2)
              for (int64_t i = j; i < next; i++) e.clear((k + r) / 2 * tile + (v + i) * W);
          else
            some_keys(bias                   ? Hidden::by_bias
                      : sight == Sight::some ? Hidden::by_range
                      : e.alibi.on           ? Hidden::by_alibi
                                             : Hidden::no,
                      e, (v + j) * W, next - j, k, m, n);
        }
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
