// The derivative of attention in a direction, O(len) memory and one pass over the keys, since the sums of weights and
// out are known:
//
//   A = d(score) = scale * (dQ K^T + Q dK^T) + d(mask) - d(slope) * distance
//   d(lse) = mu = sum P A (+ P_sink d(sink)),   d(out) = (P A) V + P dV - mu out
//
// S^T and A^T have lanes over queries, the sums lanes over v_head_dim.
//
// A row with one key that has all but its weight is gone over again with that key's A as a pivot: (A - pivot) in place
// of A is 0 there, where mu out would have to cancel (P A) V.
#pragma once
#include "tangent_stages.h"

namespace attnjourney {
namespace {

template <class Real>
struct Jvp : TileStages<Real> {
  using S = TileStages<Real>;
  using S::key_block, S::key_ld, S::line, S::tile, S::value_ld, S::width;
  using typename S::QueryRows;
  static constexpr int64_t max_rows = int64_t(Tuning::forward_tiles) * Tuning::forward_panels * S::panel;
  static constexpr int64_t max_tiles = (max_rows + tile - 1) / tile;  // that share packed keys and values

  struct JvpTile : QueryRows {
    Real* tangent_t;       // panels [head_dim][panel]: query_factor * dQ
    Real* sum;             // [tile][value_ld]: (P A) V + P dV
    Real *mu, *total;      // [2][tile]: sum P (A - pivot), sum P, and what rounding took from them
    Real* pivot;           // [tile]
    Real *most, *of_most;  // [tile]: the largest weight, and its A
    bool again;            // it has a pivot
  };

  struct Buffers {
    int64_t tiles_used;
    JvpTile tiles[max_tiles];
    Real *P, *A, *states;           // [key_block][tile]; the last one of the score modifier, or null
    Real *keys, *key_tangents;      // [key_block][key_ld]
    Real *values, *value_tangents;  // [key_block][value_ld]
    Buffers(const AttentionParams& params, int64_t rows, Scratch& scratch) : tiles_used((rows + tile - 1) / tile) {
      for (int64_t i = 0; i < tiles_used; i++) {
        JvpTile& queries = tiles[i];
        queries.query_t = scratch.take<Real>(tile * params.head_dim);
        queries.tangent_t = scratch.take<Real>(tile * params.head_dim);
        queries.sum = scratch.take<Real>(tile * value_ld(params));
        S::take_rows(scratch, queries);
        queries.mu = scratch.take<Real>(2 * tile);
        queries.total = scratch.take<Real>(2 * tile);
        queries.pivot = scratch.take<Real>(tile);
        queries.most = scratch.take<Real>(tile);
        queries.of_most = scratch.take<Real>(tile);
      }
      P = scratch.take<Real>(key_block * tile);
      A = scratch.take<Real>(key_block * tile);
      states = params.modifier.on() ? scratch.take<Real>(key_block * tile) : nullptr;
      keys = scratch.take<Real>(key_block * key_ld(params));
      key_tangents = scratch.take<Real>(key_block * key_ld(params));
      values = scratch.take<Real>(key_block * value_ld(params));
      value_tangents = scratch.take<Real>(key_block * value_ld(params));
    }
  };
  static int64_t space(const AttentionParams& params, int64_t rows) { return scratch_bytes<Buffers>(params, rows); }

  // One more term of a long sum, in the order of the keys, which does not depend on tiles as blocks of them would. What
  // rounding takes is kept next to it (Knuth's sum of two).
  static ATTN_INLINE void add_term(Vec<Real> x, Vec<Real>& sum, Vec<Real>& low) {
    const Vec<Real> next = sum + x, part = next - sum;
    low = low + ((sum - (next - part)) + (x - part));
    sum = next;
  }

  // A holds the tangent of the mask, or nothing. P A replaces it; it and P are summed over the keys. A negative P marks
  // a dropped weight, which counts in these sums alone. A hidden NaN stays hidden.
  template <bool Dropout>
  struct TangentStep {
    static constexpr bool hides = false;
    const JvpTile* queries;
    Real *P, *A;
    const Real* states;  // or null
    bool added;
    Real factor;
    Modifier<Real> modifier;
    ATTN_INLINE void clear(int64_t at) const { store(A + at, Vec<Real>::zero()); }
    template <Hidden, int M, int N>
    ATTN_INLINE void finish(Tile<Real, M, N>& x, int64_t lane0, int64_t, int64_t k) const {
      const Vec<Real> f = Vec<Real>::set(factor), zero = Vec<Real>::zero();
      const auto at = [&](int r, int j) { return (k + r) * tile + lane0 + width * j; };
      if (states) [[unlikely]]
        x.through([&](Real* products) {
          for (int r = 0; r < M; r++)
            for (int j = 0; j < N; j++, products += width)
              store(products, load(products) * modifier.slope(load(states + at(r, j))));
        });
      ATTN_UNROLL for (int j = 0; j < N; j++) {
        const int64_t lane = lane0 + width * j;
        Real *mu_at = queries->mu + lane, *total_at = queries->total + lane;
        const Vec<Real> pivot = load(queries->pivot + lane);
        Vec<Real> most = load(queries->most + lane), of_most = load(queries->of_most + lane);
        Vec<Real> mu = load(mu_at), mu_low = load(mu_at + tile), total = load(total_at),
                  total_low = load(total_at + tile);
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          Vec<Real> w = load(P + at(r, j)), kept = w, a = x.acc[r][j] * f;
          if (added) a = a + load(A + at(r, j));
          if constexpr (Dropout) {
            kept = max(zero, w);
            w = max(w, zero - w);
            store(P + at(r, j), kept);
          }
          const auto hidden = eq(w, zero);
          of_most = select(ge(most, w), of_most, a);
          most = max(w, most);
          const Vec<Real> s = select(hidden, zero, w * (a - pivot));
          add_term(s, mu, mu_low);
          add_term(w, total, total_low);
          store(A + at(r, j), Dropout ? select(eq(kept, zero), zero, s) : s);
        }
        store(queries->most + lane, most);
        store(queries->of_most + lane, of_most);
        store(mu_at, mu);
        store(mu_at + tile, mu_low);
        store(total_at, total);
        store(total_at + tile, total_low);
      }
    }
  };

  template <class T>
  static ATTN_NOINLINE void prepare(const AttentionParams& params, const HeadPointers& head,
                                    const HeadTangents& tangents, int64_t first, int64_t count, JvpTile& queries) {
    S::begin(params, head, first, count, queries);
    S::template pack_panels<T>(head.query, params.q_row, queries, params.head_dim, query_factor<Real>(params),
                               queries.query_t);
    if (tangents.query)
      S::template pack_panels<T>(tangents.query, tangents.q_row, queries, params.head_dim, query_factor<Real>(params),
                                 queries.tangent_t);
    for (int64_t r = 0; r < tile; r++) queries.pivot[r] = queries.most[r] = queries.of_most[r] = Real(0);
    queries.again = false;
    clear_sums(params, queries);
  }
  static void clear_sums(const AttentionParams& params, const JvpTile& queries) {
    for (int64_t r = 0; r < tile; r++)
      queries.mu[r] = queries.mu[tile + r] = queries.total[r] = queries.total[tile + r] = Real(0);
    memset(queries.sum, 0, size_t(tile * value_ld(params)) * sizeof(Real));
  }
  // whether any row of the tile has one
  static bool take_pivots(JvpTile& queries) {
    for (int64_t r = 0; r < queries.count; r++) {
      const Real a = queries.of_most[r];
      if (queries.most[r] < Real(0.999) || a - a != Real(0) || a == Real(0)) continue;
      queries.pivot[r] = a;
      queries.again = true;
    }
    return queries.again;
  }

  template <class T>
  static void finish(const AttentionParams& params, const HeadPointers& head, const HeadTangents& tangents,
                     const JvpTile& queries) {
    for (int64_t r = 0; r < queries.count; r++) {
      const RowMean<Real> mean(params, head, tangents, queries.first + r, queries.total[r] + queries.total[tile + r],
                               queries.pivot[r]);
      const Real mu = mean.of(queries.mu[r] + queries.mu[tile + r]);
      static_cast<Real*>(tangents.lse)[queries.first + r] = queries.pivot[r] + mu;
      write_tangent<T>(params, head, tangents, queries.first + r, mu, mean.inverse, queries.sum + r * value_ld(params));
    }
  }

  // Rows first .. first + count - 1 (count <= max_rows) of one head.
  template <class T>
  static void run(const AttentionParams& params, const HeadPointers& head, const HeadTangents& tangents, int64_t first,
                  int64_t count, void* space) {
    Buffers buffers = buffers_in<Buffers>(space, params, count);
    JvpTile* const tiles = buffers.tiles;
    const int64_t n_tiles = buffers.tiles_used;
    for (int64_t i = 0; i < n_tiles; i++)
      prepare<T>(params, head, tangents, first + i * tile, min_of(tile, count - i * tile), tiles[i]);

    if (tangents.scores() || tangents.value) add_keys<T>(params, head, tangents, first, count, buffers, false);
    bool again = false;
    if (tangents.scores())
      for (int64_t i = 0; i < n_tiles; i++)
        if (take_pivots(tiles[i])) clear_sums(params, tiles[i]), again = true;
    if (again) add_keys<T>(params, head, tangents, first, count, buffers, true);
    for (int64_t i = 0; i < n_tiles; i++) finish<T>(params, head, tangents, tiles[i]);
  }

  // The sums over all keys; `again`: of the tiles that have pivots.
  template <class T>
  static void add_keys(const AttentionParams& params, const HeadPointers& head, const HeadTangents& tangents,
                       int64_t first, int64_t count, const Buffers& buffers, bool again) {
    const JvpTile* const tiles = buffers.tiles;
    const int64_t n_tiles = buffers.tiles_used, D = params.head_dim, Dv = params.v_head_dim;
    const int64_t ldk = key_ld(params), ldv = value_ld(params);
    Real *const P = buffers.P, *const A = buffers.A, *const states = buffers.states;
    const bool scores = tangents.scores(), added = tangents.mask || tangents.slope != 0;
    KeyWalk walk(params, head, first, count, key_block);
    do {
      const int64_t k0 = walk.k0, block = walk.block;
      bool value_finite = true, tangent_finite = true;
      const auto pack = [&](const void* X, int64_t row, int64_t dim, int64_t ld, Real* to) {
        return pack_rows(static_cast<const T*>(X) + k0 * row, row, block, dim, to, ld, round_up(dim, width));
      };
      pack(head.key, params.k_row, D, ldk, buffers.keys);
      if (tangents.key) pack(tangents.key, tangents.k_row, D, ldk, buffers.key_tangents);
      if (scores) value_finite = pack(head.value, params.v_row, Dv, ldv, buffers.values);
      if (tangents.value) tangent_finite = pack(tangents.value, tangents.v_row, Dv, ldv, buffers.value_tangents);

      for (int64_t i = 0; i < n_tiles; i++) {
        const JvpTile& queries = tiles[i];
        if (again && !queries.again) continue;
        const auto weights =
            S::template recompute_weights<T>(params, queries, buffers.keys, k0, block, P, scores ? states : nullptr);
        const TileKeys& seen = weights.seen;
        if (seen.empty()) continue;
        if (params.dropout.on()) S::drop(params, queries, k0, seen, scores, P);
        if (scores) {
          if (added)
            load_tangent_bias<T>(params, tangents, queries.first, queries.count, k0 + seen.begin, seen.end - seen.begin,
                                 A + seen.begin * tile, tile);
          const typename S::template Product<2> change{
              {tangents.query ? buffers.keys : nullptr, tangents.key ? buffers.key_tangents : nullptr},
              {queries.tangent_t, queries.query_t},
              ldk,
              D};
          const auto go = [&](const auto& step) {
            S::seen_product(params, change, queries, step, step, false, k0, seen);
          };
          if (params.dropout.on())
            go(TangentStep<true>{&queries, P, A, states, added, score_factor<Real>(params), Modifier<Real>(params)});
          else
            go(TangentStep<false>{&queries, P, A, states, added, score_factor<Real>(params), Modifier<Real>(params)});
        }
        const bool hidden = weights.some_hidden();
        if (scores)
          S::sum_keys(params, queries, A, buffers.values, ldv, Dv, hidden && !value_finite, k0, seen, block,
                      queries.sum);
        if (tangents.value)
          S::sum_keys(params, queries, P, buffers.value_tangents, ldv, Dv, hidden && !tangent_finite, k0, seen, block,
                      queries.sum);
      }
    } while (walk.next());
  }
};

}  // namespace
}  // namespace attnjourney
