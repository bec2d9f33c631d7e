// The derivative of attention in a direction, O(len) memory and one pass over the keys, since lse and out are known:
//
//   A = d(score) = scale * (dQ K^T + Q dK^T) + d(mask) - d(slope) * distance
//   d(lse) = mu = sum P A (+ P_sink d(sink)),   d(out) = (P A) V + P dV - mu out
//
// S^T and A^T have lanes over queries, the sums lanes over v_head_dim.
#pragma once
#include "tangent_stages.h"

namespace attnjourney {
namespace {

template <class C>
struct Jvp : Stages<C> {
  using S = Stages<C>;
  using S::key_block, S::key_ld, S::line, S::tile, S::value_ld, S::W;
  using typename S::QueryRows;
  static constexpr int64_t max_rows = int64_t(Tuning::forward_tiles) * Tuning::forward_panels * S::panel;
  static constexpr int64_t max_tiles = (max_rows + tile - 1) / tile;  // that share packed keys and values

  struct QueryTile : QueryRows {
    C* tangent_t;   // panels [head_dim][panel]: query_factor * dQ
    C* sum;         // [tile][value_ld]: (P A) V + P dV
    C *mu, *total;  // [2][tile]: sum P A, sum P, and what rounding took from them
  };
  static int64_t tile_numbers(const AttentionParams& p) {
    return tile * (2 * round_up(p.head_dim, line) + value_ld(p) + 6);
  }

  // scratch, in numbers
  struct Space {
    int64_t tiles, P, A, cap_tanh, key, key_tangent, value, value_tangent, total;
    explicit Space(const AttentionParams& p, int64_t rows) {
      tiles = 0;
      P = tiles + (rows + tile - 1) / tile * tile_numbers(p);
      A = P + key_block * tile;
      cap_tanh = A + key_block * tile;
      key = cap_tanh + (p.softcap > 0 ? key_block * tile : 0);
      key_tangent = key + key_block * key_ld(p);
      value = key_tangent + key_block * key_ld(p);
      value_tangent = value + key_block * value_ld(p);
      total = value_tangent + key_block * value_ld(p);
    }
  };

  // One more term of a long sum, in the order of the keys, which does not depend on tiles as blocks of them would. What
  // rounding takes is kept beside it (Knuth's sum of two).
  static ATTN_INLINE void add_term(Vec<C> x, Vec<C>& sum, Vec<C>& low) {
    const Vec<C> next = sum + x, part = next - sum;
    low = low + ((sum - (next - part)) + (x - part));
    sum = next;
  }

  // A holds the tangent of the mask, or nothing. P A replaces it; it and P are summed over the keys. A negative P marks
  // a dropped weight, which counts in these sums alone. A hidden NaN stays hidden.
  template <bool Dropout>
  struct TangentStep {
    static constexpr bool hides = false;
    const QueryTile* t;
    C *P, *A;
    const C* cap_tanh;  // or null
    bool added;
    C factor;
    ATTN_INLINE void clear(int64_t at) const { store(A + at, Vec<C>::zero()); }
    template <Hidden, int M, int N>
    ATTN_INLINE void finish(Tile<C, M, N>& x, int64_t lane0, int64_t, int64_t k) const {
      const Vec<C> f = Vec<C>::set(factor), zero = Vec<C>::zero();
      const auto at = [&](int r, int j) { return (k + r) * tile + lane0 + W * j; };
      if (cap_tanh) [[unlikely]]
        for (int r = 0; r < M; r++)
          for (int j = 0; j < N; j++) x.a[r][j] = x.a[r][j] * cap_slope(load(cap_tanh + at(r, j)));
      ATTN_UNROLL for (int j = 0; j < N; j++) {
        C *mu_at = t->mu + lane0 + W * j, *total_at = t->total + lane0 + W * j;
        Vec<C> mu = load(mu_at), mu_low = load(mu_at + tile), total = load(total_at), total_low = load(total_at + tile);
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          Vec<C> w = load(P + at(r, j)), kept = w, a = x.a[r][j] * f;
          if (added) a = a + load(A + at(r, j));
          if constexpr (Dropout) {
            kept = max(zero, w);
            w = max(w, zero - w);
            store(P + at(r, j), kept);
          }
          const auto hidden = eq(w, zero);
          const Vec<C> s = select(hidden, zero, w * a);
          add_term(s, mu, mu_low);
          add_term(w, total, total_low);
          store(A + at(r, j), Dropout ? select(eq(kept, zero), zero, s) : s);
        }
        store(mu_at, mu);
        store(mu_at + tile, mu_low);
        store(total_at, total);
        store(total_at + tile, total_low);
      }
    }
  };

  template <class T>
  static ATTN_NOINLINE void prepare(const AttentionParams& p, const HeadPointers& h, const HeadTangents& d,
                                    int64_t first, int64_t count, C* at, QueryTile& t) {
    t.query_t = at;
    t.tangent_t = t.query_t + tile * round_up(p.head_dim, line);
    t.sum = t.tangent_t + tile * round_up(p.head_dim, line);
    t.minus_lse = t.sum + tile * value_ld(p);
    t.minus_lse_low = t.minus_lse + tile;
    t.mu = t.minus_lse_low + tile;
    t.total = t.mu + 2 * tile;
    S::begin(h, first, count, t);
    S::template pack_panels<T>(h.query, p.q_row, t, p.head_dim, query_factor<C>(p), t.query_t);
    if (d.query) S::template pack_panels<T>(d.query, d.q_row, t, p.head_dim, query_factor<C>(p), t.tangent_t);
    for (int64_t r = 0; r < tile; r++) {
      split_lse(r < count ? static_cast<const C*>(h.lse)[first + r] : C(0), t.minus_lse[r], t.minus_lse_low[r]);
      t.mu[r] = t.mu[tile + r] = t.total[r] = t.total[tile + r] = C(0);
    }
    memset(t.sum, 0, size_t(tile * value_ld(p)) * sizeof(C));
  }

  template <class T>
  static void finish(const AttentionParams& p, const HeadPointers& h, const HeadTangents& d, const QueryTile& t) {
    for (int64_t r = 0; r < t.count; r++) {
      const RowMean<C> mean(h, d, t.first + r, t.total[r] + t.total[tile + r]);
      const C mu = mean.of(t.mu[r] + t.mu[tile + r]), factor = mean.inverse * C(p.dropout.keep_scale);
      static_cast<C*>(d.lse)[t.first + r] = mu;
      const T* out = static_cast<const T*>(h.out) + (t.first + r) * p.out_row;
      T* y = static_cast<T*>(d.out) + (t.first + r) * d.out_row;
      const C* x = t.sum + r * value_ld(p);
      int64_t i = 0;
      for (; i + W <= p.v_head_dim; i += W)
        store(y + i, fma(Vec<C>::set(-mu), load(out + i), Vec<C>::set(factor) * load(x + i)));
      for (; i < p.v_head_dim; i++) store_one(y + i, fma(-mu, C(load_one(out + i)), factor * x[i]));
    }
  }

  // Rows first .. first + count - 1 (count <= max_rows) of one head.
  template <class T>
  static void run(const AttentionParams& p, const HeadPointers& h, const HeadTangents& d, int64_t first, int64_t count,
                  C* space) {
    const Space at(p, count);
    const int64_t n_tiles = (count + tile - 1) / tile, D = p.head_dim, Dv = p.v_head_dim;
    const int64_t ldk = key_ld(p), ldv = value_ld(p);
    C *P = space + at.P, *A = space + at.A, *cap_tanh = p.softcap > 0 ? space + at.cap_tanh : nullptr;
    QueryTile tiles[max_tiles];
    for (int64_t i = 0; i < n_tiles; i++)
      prepare<T>(p, h, d, first + i * tile, min_of(tile, count - i * tile), space + at.tiles + i * tile_numbers(p),
                 tiles[i]);

    const bool scores = d.scores(), added = d.mask || d.slope != 0;
    if (!scores && !d.value) return finish_all<T>(p, h, d, tiles, n_tiles);
    KeyWalk walk(p, h, first, count, key_block);
    do {
      const int64_t k0 = walk.k0, block = walk.block;
      bool value_finite = true, tangent_finite = true;
      const auto pack = [&](const void* X, int64_t row, int64_t dim, int64_t ld, int64_t to) {
        return pack_rows(static_cast<const T*>(X) + k0 * row, row, block, dim, space + to, ld, round_up(dim, W));
      };
      pack(h.key, p.k_row, D, ldk, at.key);
      if (d.key) pack(d.key, d.k_row, D, ldk, at.key_tangent);
      if (scores) value_finite = pack(h.value, p.v_row, Dv, ldv, at.value);
      if (d.value) tangent_finite = pack(d.value, d.v_row, Dv, ldv, at.value_tangent);

      for (int64_t i = 0; i < n_tiles; i++) {
        const QueryTile& t = tiles[i];
        const auto weighed = S::template weigh<T>(p, t, space + at.key, k0, block, P, scores ? cap_tanh : nullptr);
        const TileKeys& seen = weighed.seen;
        if (seen.empty()) continue;
        if (p.dropout.on()) S::drop(p, t, k0, seen, scores, P);
        if (scores) {
          if (added)
            load_tangent_bias<T>(p, d, t.first, t.count, k0 + seen.begin, seen.end - seen.begin, A + seen.begin * tile,
                                 tile);
          const typename S::template Product<2> change{
              {d.query ? space + at.key : nullptr, d.key ? space + at.key_tangent : nullptr},
              {t.tangent_t, t.query_t},
              ldk,
              D};
          const auto go = [&](const auto& step) { S::seen_product(p, change, t, step, step, false, k0, seen); };
          if (p.dropout.on())
            go(TangentStep<true>{&t, P, A, cap_tanh, added, tangent_factor<C>(p)});
          else
            go(TangentStep<false>{&t, P, A, cap_tanh, added, tangent_factor<C>(p)});
        }
        const bool hidden = weighed.some_hidden();
        if (scores) S::sum_keys(p, t, A, space + at.value, ldv, Dv, hidden && !value_finite, k0, seen, block, t.sum);
        if (d.value)
          S::sum_keys(p, t, P, space + at.value_tangent, ldv, Dv, hidden && !tangent_finite, k0, seen, block, t.sum);
      }
    } while (walk.next());
    finish_all<T>(p, h, d, tiles, n_tiles);
  }
  template <class T>
  static void finish_all(const AttentionParams& p, const HeadPointers& h, const HeadTangents& d, const QueryTile* tiles,
                         int64_t n_tiles) {
    for (int64_t i = 0; i < n_tiles; i++) finish<T>(p, h, d, tiles[i]);
  }
};

}  // namespace
}  // namespace attnjourney
