// Attention backward (Dao et al. 2022, arXiv 2205.14135): P is recomputed from lse, O(len) memory.
//
// S^T = K Q^T and dP^T = V dO^T have lanes over queries, so exp2 and P * (dP - delta) are vertical; dV = P^T dO,
// dK = dS^T Q and dQ = dS K have lanes over head_dim.
#pragma once
#include "walk.h"

namespace attnjourney {
namespace {

template <class C>
struct Backward : Stages<C> {
  using S = Stages<C>;
  using S::key_block, S::key_ld, S::line, S::tile, S::value_ld, S::W;
  using typename S::QueryRows, typename S::Wanted;
  static constexpr int64_t chunk_bytes = Tuning::backward_chunk_bytes;

  // numbers of one packed query tile: Q^T, dO^T, Q, dO, dQ, -lse, -delta
  static int64_t tile_numbers(const AttentionParams& p) {
    return tile * (round_up(p.head_dim, line) + round_up(p.v_head_dim, line) + 2 * key_ld(p) + value_ld(p) + 3);
  }
  static int64_t chunk_tiles(const AttentionParams& p) {
    const int64_t fit = chunk_bytes / (tile_numbers(p) * int64_t(sizeof(C)));
    return max_of(1, min_of(fit, p.group * S::tiles_per_head(p)));
  }

  // scratch, in numbers
  struct Space {
    int64_t chunk, P, dS, cap_tanh, key, value, grad_key, grad_value, total;
    explicit Space(const AttentionParams& p) {
      chunk = 0;
      P = chunk + chunk_tiles(p) * tile_numbers(p);
      dS = P + key_block * tile;
      cap_tanh = dS + key_block * tile;
      key = cap_tanh + (p.softcap > 0 ? key_block * tile : 0);
      value = key + key_block * key_ld(p);
      grad_key = value + key_block * value_ld(p);
      grad_value = grad_key + p.kv_len * round_up(p.head_dim, line);
      total = grad_value + p.kv_len * round_up(p.v_head_dim, line);
    }
  };

  struct QueryTile : QueryRows {
    C* grad_t;              // panels [dim][panel]: dO / (1 - dropout_p)
    const C *query, *grad;  // [tile][ld]
    int64_t query_ld, grad_ld;
    C *query_copy, *grad_copy;
    C* grad_query;   // [tile][ld], sum of dS K
    C* minus_delta;  // [tile]
    bool query_finite, grad_finite;
  };

  static QueryTile place(const AttentionParams& p, C* at) {
    QueryTile t;
    t.query_t = at;
    t.grad_t = t.query_t + tile * round_up(p.head_dim, line);
    t.grad_query = t.grad_t + tile * round_up(p.v_head_dim, line);
    t.minus_lse = t.grad_query + tile * key_ld(p);
    t.minus_lse_low = t.minus_lse + tile;
    t.minus_delta = t.minus_lse_low + tile;
    t.query_copy = t.minus_delta + tile;
    t.grad_copy = t.query_copy + tile * key_ld(p);
    return t;
  }

  // Rows of X in compute precision: in place where they are dense, else copied to Y
  template <class T>
  static ATTN_INLINE const C* rows_of(const T* X, int64_t ld, int64_t rows, int64_t dim, C* Y, int64_t ldy,
                                      int64_t& ld_of_rows) {
    if (sizeof(T) == sizeof(C) && ld == dim && dim % W == 0) return ld_of_rows = ld, reinterpret_cast<const C*>(X);
    pack_rows(X, ld, rows, dim, Y, ldy, round_up(dim, W));
    return ld_of_rows = ldy, Y;
  }

  template <class T>
  static ATTN_NOINLINE void prepare(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t count,
                                    QueryTile& t, double* grad_sink) {
    const int64_t D = p.head_dim, Dv = p.v_head_dim;
    const T* q = static_cast<const T*>(h.query) + first * p.q_row;
    const T* g = static_cast<const T*>(h.grad_out) + first * p.grad_out_row;
    const T* o = static_cast<const T*>(h.out) + first * p.out_row;
    const C* lse = static_cast<const C*>(h.lse) + first;
    S::begin(h, first, count, t);
    t.query_finite = S::template pack_panels<T>(h.query, p.q_row, t, D, query_factor<C>(p), t.query_t);
    t.grad_finite = S::template pack_panels<T>(h.grad_out, p.grad_out_row, t, Dv, C(p.dropout.keep_scale), t.grad_t);
    t.query = rows_of(q, p.q_row, count, D, t.query_copy, key_ld(p), t.query_ld);
    t.grad = rows_of(g, p.grad_out_row, count, Dv, t.grad_copy, value_ld(p), t.grad_ld);
    for (int64_t r = 0; r < tile; r++) {
      C delta = 0;
      if (r < count) {
        delta = S::dot(o + r * p.out_row, t.grad + r * t.grad_ld, Dv);
        if (h.grad_lse) delta -= static_cast<const C*>(h.grad_lse)[first + r];
      }
      split_lse(r < count ? lse[r] : C(0), t.minus_lse[r], t.minus_lse_low[r]);
      if (grad_sink && r < count && h.sink != -__builtin_inf())
        *grad_sink -= __builtin_exp2((h.sink - double(lse[r])) * log2_e) * double(delta);
      t.minus_delta[r] = -delta;
    }
    memset(t.grad_query, 0, size_t(tile * key_ld(p)) * sizeof(C));
  }

  template <bool Dropout, bool Guard>
  struct GradientStep {  // dS = P * (dP - delta)
    static constexpr bool hides = false;
    const QueryTile* t;
    C *P, *dS;
    ATTN_INLINE void clear(int64_t at) const { store(dS + at, Vec<C>::zero()); }
    template <Hidden, int M, int N>
    ATTN_INLINE void finish(Tile<C, M, N>& x, int64_t lane0, int64_t, int64_t k) const {
      const int64_t at = k * tile + lane0;
      ATTN_UNROLL for (int j = 0; j < N; j++) {
        const Vec<C> delta = load(t->minus_delta + lane0 + W * j);
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          Vec<C> w = load(P + at + r * tile + W * j), y = x.a[r][j] + delta;
          if constexpr (Dropout) {  // a negative P marks a dropped weight
            const auto kept = ge(w, Vec<C>::zero());
            y = select(kept, y, delta);
            const Vec<C> zero = Vec<C>::zero(), left = max(zero, w);
            w = max(w, zero - w);
            store(P + at + r * tile + W * j, left);
          }
          Vec<C> s = w * y;
          if constexpr (Guard) s = select(eq(w, Vec<C>::zero()), Vec<C>::zero(), s);  // a hidden NaN stays hidden
          store(dS + at + r * tile + W * j, s);
        }
      }
    }
  };

  // dS by the capped scores -> dS by the scores; a hidden NaN stays hidden
  static ATTN_NOINLINE void through_softcap(const QueryTile& t, const C* cap_tanh, const TileKeys& seen, C* dS) {
    const Vec<C> zero = Vec<C>::zero();
    for (int64_t k = seen.begin; k < seen.end; k++)
      for (int64_t i = 0; i < t.vectors_used; i++) {
        C* x = dS + k * tile + i * W;
        const Vec<C> s = load(x);
        store(x, select(eq(s, zero), zero, s * cap_slope(load(cap_tanh + k * tile + i * W))));
      }
  }

  // One query tile against one key block.
  template <class T, bool DropoutOn>
  static void tile_step(const AttentionParams& p, const QueryTile& t, const Wanted& w, const C* K, const C* V,
                        bool key_finite, int64_t k0, int64_t block, C* P, C* dS, C* cap_tanh, C* grad_key,
                        C* grad_value) {
    const auto weighed = S::template weigh<T>(p, t, K, k0, block, P, w.scores() ? cap_tanh : nullptr);
    const TileKeys& seen = weighed.seen;
    if (seen.empty()) return;
    if (DropoutOn) S::drop(p, t, k0, seen, w.scores(), P);
    if (w.scores()) {
      const typename S::template Product<1> grad{{V}, {t.grad_t}, value_ld(p), p.v_head_dim};
      const GradientStep<DropoutOn, true> careful{&t, P, dS};
      if (weighed.bias)
        S::seen_product(p, grad, t, careful, careful, true, k0, seen);
      else
        S::seen_product(p, grad, t, careful, GradientStep<DropoutOn, false>{&t, P, dS}, false, k0, seen);
    }

    const bool hidden = weighed.some_hidden();
    if (w.value)
      S::sum_queries(p, t, P, t.grad, t.grad_ld, hidden && !t.grad_finite, k0, seen, p.v_head_dim, grad_value);
    if (w.slope) *w.slope += S::slope_gradient(p, t, dS, k0, seen);
    if (w.mask) S::template mask_gradient<T>(t, w, dS, k0, seen, P);  // P has served
    if (p.softcap > 0 && (w.key || w.query)) through_softcap(t, cap_tanh, seen, dS);
    if (w.key) S::sum_queries(p, t, dS, t.query, t.query_ld, hidden && !t.query_finite, k0, seen, p.head_dim, grad_key);
    if (w.query) S::sum_keys(p, t, dS, K, key_ld(p), p.head_dim, hidden && !key_finite, k0, seen, block, t.grad_query);
  }

  template <class T>
  struct Kernel {  // see attention/walk.h
    const Walk& walk;
    C* space;
    Space at;
    int64_t chunk;
    bool key_finite;
    int64_t used = 0;  // tiles
    QueryTile tiles[Tuning::backward_max_tiles];

    Kernel(const Walk& w, C* s) : walk(w), space(s), at(w.params), chunk(chunk_tiles(w.params)), key_finite(true) {}
    void prepare(int64_t i, int64_t head, int64_t first, int64_t count) {
      used = i + 1;
      tiles[i] = place(walk.params, space + at.chunk + i * tile_numbers(walk.params));
      Backward::template prepare<T>(walk.params, walk.heads[head], first, count, tiles[i],
                                    walk.part == 0 ? walk.gradients[head].sink : nullptr);
    }
    void load(int64_t k0, int64_t block) {
      const AttentionParams& p = walk.params;
      key_finite = pack_rows(static_cast<const T*>(walk.heads[0].key) + k0 * p.k_row, p.k_row, block, p.head_dim,
                             space + at.key, key_ld(p), round_up(p.head_dim, W));
      pack_rows(static_cast<const T*>(walk.heads[0].value) + k0 * p.v_row, p.v_row, block, p.v_head_dim,
                space + at.value, value_ld(p), round_up(p.v_head_dim, W));
    }
    void step(int64_t i, const Wanted& w, int64_t k0, int64_t block, C* grad_key, C* grad_value) {
      const AttentionParams& p = walk.params;
      Ahead ahead;
      if (p.mask != MaskKind::none) {
        const QueryTile& next = tiles[i + 1 < used ? i + 1 : 0];
        const int64_t k = i + 1 < used ? k0 : k0 + block;
        look_up_mask<T>(p, next.head->mask, next.first, next.count, k, min_of(key_block, p.kv_len - k), ahead);
        if (w.mask && w.mask_row != 0 && w.mask_col == 1) {
          const int64_t at = tiles[i].first * w.mask_row + k0;
          if (w.mask_once)
            ahead.add(static_cast<const T*>(w.mask) + at, w.mask_row, block);
          else
            ahead.add(static_cast<const C*>(w.mask) + at, w.mask_row, block);
        }
        tiles[i].ahead = &ahead;
      }
      const auto go = walk.params.dropout.on() ? tile_step<T, true> : tile_step<T, false>;
      go(walk.params, tiles[i], w, space + at.key, space + at.value, key_finite, k0, block, space + at.P, space + at.dS,
         space + at.cap_tanh, grad_key, grad_value);
      tiles[i].ahead = nullptr;
    }
    const C* query_sum(int64_t i) const { return tiles[i].grad_query; }
  };

  template <class T>
  static void run(const Walk& walk, C* space) {
    Kernel<T> kernel(walk, space);
    walk_keys<T>(walk, kernel, space + kernel.at.grad_key, space + kernel.at.grad_value);
  }
};

}  // namespace
}  // namespace attnjourney
