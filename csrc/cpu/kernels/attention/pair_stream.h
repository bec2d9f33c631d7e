// Products of bfloat16 pairs with lanes over queries, and their epilogue: a group of keys at a time, the weights of a
// group computed between the products of the next, for the two need different units of the processor.
#pragma once
#include "cpu/kernels/common/score_modifier.h"
#include "pair_tiles.h"

namespace attnjourney {
namespace {

// X[key][2 pairs] times panels Y[pairs][panel]
struct PairTerm {
  const bf16* X;
  int64_t ld;
  const uint32_t* Y;
};

// A query tile against a key block.
struct PairTask {
  int64_t pairs, vectors_used;
  const KeyRanges* keys;
  int64_t first_row, k0;
  Modifier<float> modifier;
  Alibi<float> alibi;
  RowPrefetch* prefetch;  // of the mask
};

// Products on their way to weights, [key pair][vector][low, high][width], keys [begin, end) of the block.
struct PendingScores {
  const float *scores, *others;  // of the last term; of those before it
  float* sums;                   // [vector][2][width], for the epilogue
  int64_t begin, end, key;
  int vector, left;  // pairs of vectors
};

// Epilogue:
//   PairTask task
//   PairTerm terms[most]; int count      all but the last are summed up apart from it
//   clear(at)                            a pair of vectors that nothing sees
//   Queries                              what it keeps of a vector of queries
//   Cursor, cursor(lane, key, queries)   where in that and in the result it stands
//   softmax<H>(pending, scores, cursor)  one pair of vectors: two keys for a vector of queries
//   modify(scores, others, vectors)      the score modifier, where it is not part of softmax
//   kind(hidden)                         as which other kind it treats keys: fewer kinds are sooner compiled
template <class Epilogue>
struct PairStream : PairTiles {
  template <Hidden H, int N>
  static ATTN_INLINE void softmax(PendingScores& pending, typename Epilogue::Cursor& at, const Epilogue& epilogue) {
    const Vf scores[2] = {load(pending.scores), load(pending.scores + width)};
    epilogue.template softmax<H>(pending, scores, at);
    pending.scores += 2 * width;
    if constexpr (Epilogue::most > 1) pending.others += 2 * width;
    pending.left--;
    at.next_vector();
    if (++pending.vector == N) {
      pending.vector = 0;
      pending.key += 2;
      at.next_keys(N);
    }
  }
  // what is left of them; a copy, so that the original can stay in registers
  template <Hidden H, int N>
  static ATTN_NOINLINE void finish(PendingScores pending, typename Epilogue::Cursor at, const Epilogue& epilogue) {
    while (pending.left > 0) softmax<H, N>(pending, at, epilogue);
  }

  template <int M, int N>
  static ATTN_INLINE void clear(Vf (&t)[M][N]) {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++) t[r][j] = Vf::zero();
  }
  template <int M, int N>
  static ATTN_INLINE void spill(const Vf (&t)[M][N], float* to) {
    ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
        store(to + ((r / 2 * N + j) * 2 + r % 2) * width, t[r][j]);
  }
  template <int M, int Padded, int N>
  static ATTN_INLINE void add_product(Vf (&t)[Padded][N], const bf16* X, int64_t ld, const uint32_t* Y) {
    Pairs y[N];
    ATTN_UNROLL for (int j = 0; j < N; j++) y[j] = load_pairs(Y + width * j);
    ATTN_UNROLL for (int r = 0; r < M; r++) {
      const PairForAll x = broadcast_pair(X + r * ld);
      ATTN_UNROLL for (int j = 0; j < N; j++) t[r][j] = dot_pairs(t[r][j], x, y[j]);
    }
  }

  // n groups of M keys, from key k of the block on, against N vectors from lane0 on
  template <Hidden H, int M, int N>
  static ATTN_NOINLINE void stream(const Epilogue& epilogue, int64_t lane0, int64_t k, int64_t n) {
    constexpr bool several = Epilogue::most > 1;
    constexpr int numbers = (M + 1) / 2 * 2 * N * width;
    alignas(64) float scores[numbers], others[several ? numbers : 1], sums[several ? 2 * N * width : 1];
    if constexpr (M % 2) memset(scores, 0, sizeof scores);
    if constexpr (several) memset(others, 0, sizeof others);
    const int64_t pairs = epilogue.task.pairs, panel_at = lane0 / panel * panel * pairs + lane0 % panel;
    PendingScores pending{
        .scores = scores, .others = others, .sums = sums, .begin = k, .end = k, .key = k, .vector = 0, .left = 0};
    typename Epilogue::Cursor cursor;
    for (int64_t i = 0; i < n; i++, k += M) {
      Vf t[M][N];
      clear(t);
      for (int c = 0; c < epilogue.count; c++) {
        if (several && c > 0 && c == epilogue.count - 1) {
          if (pending.left > 0) {
            finish<H, N>(pending, cursor, epilogue);
            pending.left = 0;
          }
          spill(t, others);
          clear(t);
        }
        const PairTerm term = epilogue.terms[c];
        const bf16* X = term.X + k * term.ld;
        const uint32_t* Y = term.Y + panel_at;
        int64_t at = 0;
        for (; at + 2 <= pairs && pending.left > 0; at += 2) {
          add_product<M>(t, X + 2 * at, term.ld, Y + at * panel);
          add_product<M>(t, X + 2 * at + 2, term.ld, Y + at * panel + panel);
          softmax<H, N>(pending, cursor, epilogue);
        }
        _Pragma("GCC unroll 2") for (; at < pairs; at++) add_product<M>(t, X + 2 * at, term.ld, Y + at * panel);
      }
      if (pending.left > 0) finish<H, N>(pending, cursor, epilogue);
      spill(t, scores);
      if constexpr (Epilogue::modifies)
        if (epilogue.task.modifier.on()) [[unlikely]]
          epilogue.modify(scores, others, numbers / width);
      pending = {.scores = scores,
                 .others = others,
                 .sums = sums,
                 .begin = k,
                 .end = k + M,
                 .key = k,
                 .vector = 0,
                 .left = (M + 1) / 2 * N};
      cursor = epilogue.cursor(lane0, k, epilogue.queries + lane0 / width);
      if constexpr (H == Hidden::by_bias || H == Hidden::by_sum) epilogue.task.prefetch->step();
    }
    finish<H, N>(pending, cursor, epilogue);
  }

  // a group of M keys, of which some may be hidden: its weights where it was computed
  template <Hidden H, int M, int N>
  static ATTN_NOINLINE void single(const Epilogue& epilogue, int64_t lane0, int64_t k) {
    if (Epilogue::most > 1 || (Epilogue::modifies && epilogue.task.modifier.on()))
      return stream<H, M, N>(epilogue, lane0, k, 1);
    const int64_t pairs = epilogue.task.pairs;
    Vf t[M + M % 2][N];  // an odd last key is paired with a score that is not looked at
    clear(t);
    const PairTerm term = epilogue.terms[0];
    const bf16* X = term.X + k * term.ld;
    const uint32_t* Y = term.Y + lane0 / panel * panel * pairs + lane0 % panel;
    _Pragma("GCC unroll 2") for (int64_t at = 0; at < pairs; at++)
        add_product<M>(t, X + 2 * at, term.ld, Y + at * panel);
    ATTN_UNROLL for (int j = 0; j < N; j++) {
      const int64_t lane = lane0 + width * j;
      typename Epilogue::Queries mine = epilogue.queries[lane / width];
      ATTN_UNROLL for (int r = 0; r < M; r += 2) {
        const Vf scores[2] = {t[r][j], t[r + 1][j]};
        const PendingScores pending{.scores = nullptr,
                                    .others = nullptr,
                                    .sums = nullptr,
                                    .begin = k,
                                    .end = k + M,
                                    .key = k + r,
                                    .vector = j,
                                    .left = 0};
        epilogue.template softmax<H>(pending, scores, epilogue.cursor(lane, k + r, &mine));
      }
      epilogue.queries[lane / width] = mine;
    }
    if constexpr (H == Hidden::by_bias || H == Hidden::by_sum) epilogue.task.prefetch->step();
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
  static ATTN_INLINE void single(Hidden hidden, const Epilogue& epilogue, int64_t lane0, int64_t k) {
    if (hidden == Hidden::by_bias) return single<Hidden::by_bias, M, N>(epilogue, lane0, k);
    if constexpr (M % rows == 0) {
      if (hidden == Hidden::by_alibi) return single<Epilogue::kind(Hidden::by_alibi), M, N>(epilogue, lane0, k);
      if (hidden == Hidden::no) return single<Hidden::no, M, N>(epilogue, lane0, k);
    }
    single<Hidden::by_range, M, N>(epilogue, lane0, k);
  }
  // n groups of m keys against `used` vectors; n is 1 where m < rows
  static ATTN_NOINLINE void some_keys(Hidden hidden, const Epilogue& epilogue, int64_t lane0, int64_t used, int64_t k,
                                      int64_t m, int64_t n) {
    for (; used == 1 && n > 1; n -= 2, k += 2 * rows)
      single<2 * rows, 1>(hidden, epilogue, lane0, k);  // hides latencies
    for (; n > 0; n--, k += rows)
      with_rows<vectors>(used, [&](auto n_) {
        if (m == rows) return single<rows, n_.count>(hidden, epilogue, lane0, k);
        in_powers<rows / 2>(
            m, [&](int64_t first, auto m_) { single<m_.count, n_.count>(hidden, epilogue, lane0, k + first); });
      });
  }
  // keys [begin, end) of the block, seen by every row but for the bias block
  template <Hidden H>
  static ATTN_NOINLINE void inner(const Epilogue& epilogue, int64_t begin, int64_t end) {
    const int64_t n = (end - begin) / rows, rest = begin + n * rows;
    for (int64_t v = 0; v < epilogue.task.vectors_used; v += vectors) {
      const int64_t used = min_of(vectors, epilogue.task.vectors_used - v);
      if (n) with_rows<vectors>(used, [&](auto n_) { stream<H, rows, n_.count>(epilogue, v * width, begin, n); });
      if (rest < end)
        some_keys(H == Hidden::by_bias || H == Hidden::by_sum ? Hidden::by_bias : Hidden::by_range, epilogue, v * width,
                  used, rest, end - rest, 1);
    }
  }
  // keys [begin, end) of the block, seen by some rows only: vectors of rows that see none of a group are skipped
  static ATTN_NOINLINE void border(const Epilogue& epilogue, int64_t begin, int64_t end, int64_t rows_used, bool bias) {
    const PairTask& task = epilogue.task;
    for (int64_t v = 0; v < task.vectors_used && begin < end; v += vectors) {
      TileKeys seen[vectors] = {};
      for (int64_t j = 0; j < vectors && v + j < task.vectors_used; j++) {
        const int64_t row = (v + j) * width;
        seen[j] = tile_keys(*task.keys, task.first_row + row, task.first_row + min_of(rows_used, row + width) - 1,
                            task.k0, end);
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
              for (int64_t i = j; i < next; i++) epilogue.clear((k + r) / 2 * tile + (v + i) * width);
          else
            some_keys(bias                   ? Hidden::by_bias
                      : sight == Sight::some ? Hidden::by_range
                      : task.alibi.on        ? Hidden::by_alibi
                                             : Hidden::no,
                      epilogue, (v + j) * width, next - j, k, m, n);
        }
      }
    }
  }
  // all keys of `seen`
  static ATTN_INLINE void all(const Epilogue& epilogue, const TileKeys& seen, int64_t rows_used, MaskBlock masked) {
    const bool bias = has_block(masked);
    border(epilogue, seen.begin, seen.all_begin, rows_used, bias);
    with_hidden(inside(masked),
                [&](auto hidden) { inner<Epilogue::kind(hidden.value)>(epilogue, seen.all_begin, seen.all_end); });
    border(epilogue, seen.all_end, seen.end, rows_used, bias);
  }
};

}  // namespace
}  // namespace attnjourney
