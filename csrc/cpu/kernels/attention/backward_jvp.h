// The derivative of attention's backward in a direction; with no tangent of grad_out it is the double backward, too:
// the Hessian is symmetric. O(len) memory. With mu = d(lse) and d(out) known from the jvp:
//
//   A = d(score),  dP = V dO^T,  delta = rowsum(dO out) - grad_lse,  dS = P (dP - delta)
//   d(P) = P (A - mu),  d(dS) = d(P) (dP - delta) + P (d(dP) - d(delta))
//   d(dQ) = scale (d(dS) K + dS dK'),  d(dK) = scale (d(dS)^T Q + dS^T dQ'),  d(dV) = d(P)^T dO + P^T d(dO)
//
// where dQ', dK' are the tangents of Q and K. With softcap f: dS by the scores is f' dS, its derivative
// f' d(dS) + f'' d(score before f) dS. Dropout multiplies P and dP where the backward has it.
#pragma once
#include "tangent_stages.h"
#include "walk.h"

namespace attnjourney {
namespace {

template <class C>
struct BackwardJvp : Stages<C> {
  using S = Stages<C>;
  using S::key_block, S::key_ld, S::line, S::tile, S::value_ld, S::W;
  using typename S::QueryRows, typename S::Wanted;
  static constexpr int64_t block_numbers = key_block * tile;

  // numbers of one packed query tile: Q^T, dQ'^T, dO^T, d(dO)^T, Q, dQ', dO, d(dO), d(dQ), and five numbers a row
  static int64_t tile_numbers(const AttentionParams& p) {
    return tile *
           (2 * (round_up(p.head_dim, line) + round_up(p.v_head_dim, line)) + 3 * key_ld(p) + 2 * value_ld(p) + 5);
  }
  static int64_t chunk_tiles(const AttentionParams& p) {
    const int64_t fit = Tuning::backward_chunk_bytes / (tile_numbers(p) * int64_t(sizeof(C)));
    return max_of(1, min_of(fit, p.group * S::tiles_per_head(p)));
  }

  // scratch, in numbers
  struct Space {
    int64_t chunk, P, P_change, dP, dS_change, cap_tanh, score_change, key, key_tangent, value, value_tangent, grad_key,
        grad_value, total;
    explicit Space(const AttentionParams& p) {
      const int64_t capped = p.softcap > 0 ? block_numbers : 0;
      chunk = 0;
      P = chunk + chunk_tiles(p) * tile_numbers(p);
      P_change = P + block_numbers;
      dP = P_change + block_numbers;
      dS_change = dP + block_numbers;
      cap_tanh = dS_change + block_numbers;
      score_change = cap_tanh + capped;
      key = score_change + capped;
      key_tangent = key + key_block * key_ld(p);
      value = key_tangent + key_block * key_ld(p);
      value_tangent = value + key_block * value_ld(p);
      grad_key = value_tangent + key_block * value_ld(p);
      grad_value = grad_key + p.kv_len * round_up(p.head_dim, line);
      total = grad_value + p.kv_len * round_up(p.v_head_dim, line);
    }
  };

  struct QueryTile : QueryRows {
    const HeadTangents* tangents;
    C *tangent_t, *grad_t, *grad_tangent_t;          // panels, packed as Q^T is: dQ'^T, dO^T, d(dO)^T
    C *query, *query_tangent, *grad, *grad_tangent;  // [tile][ld]
    C* sum;                                          // [tile][key_ld]: d(dS) K + dS dK'
    C *mu, *minus_delta, *minus_delta_change;        // [tile]
    bool query_finite, tangent_finite, grad_finite, grad_tangent_finite;
  };

  static QueryTile place(const AttentionParams& p, C* at) {
    QueryTile t;
    const int64_t D = round_up(p.head_dim, line), Dv = round_up(p.v_head_dim, line);
    const auto take = [&](int64_t numbers) {
      C* here = at;
      at += tile * numbers;
      return here;
    };
    t.query_t = take(D), t.tangent_t = take(D), t.grad_t = take(Dv), t.grad_tangent_t = take(Dv);
    t.query = take(key_ld(p)), t.query_tangent = take(key_ld(p)), t.sum = take(key_ld(p));
    t.grad = take(value_ld(p)), t.grad_tangent = take(value_ld(p));
    t.minus_lse = take(1), t.minus_lse_low = take(1);
    t.mu = take(1), t.minus_delta = take(1), t.minus_delta_change = take(1);
    return t;
  }

  // X as panels and as rows; tells whether every number is finite
  template <class T>
  static bool pack_both(const void* X, int64_t row, const QueryTile& t, int64_t dim, C factor, C* panels, C* rows,
                        int64_t ld) {
    if (!X) return true;
    S::template pack_panels<T>(X, row, t, dim, factor, panels);
    return pack_rows(static_cast<const T*>(X) + t.first * row, row, t.count, dim, rows, ld, round_up(dim, W));
  }

  template <class T>
  static ATTN_NOINLINE void prepare(const AttentionParams& p, const HeadPointers& h, const HeadTangents& d,
                                    int64_t first, int64_t count, QueryTile& t, double* grad_sink) {
    const int64_t D = p.head_dim, Dv = p.v_head_dim, ldk = key_ld(p), ldv = value_ld(p);
    const C factor = query_factor<C>(p), keep = C(p.dropout.keep_scale);
    S::begin(h, first, count, t);
    t.tangents = &d;
    t.query_finite = pack_both<T>(h.query, p.q_row, t, D, factor, t.query_t, t.query, ldk);
    t.tangent_finite = pack_both<T>(d.query, d.q_row, t, D, factor, t.tangent_t, t.query_tangent, ldk);
    t.grad_finite = pack_both<T>(h.grad_out, p.grad_out_row, t, Dv, keep, t.grad_t, t.grad, ldv);
    t.grad_tangent_finite =
        pack_both<T>(d.grad_out, d.grad_out_row, t, Dv, keep, t.grad_tangent_t, t.grad_tangent, ldv);
    const auto number = [&](const void* x, int64_t r) { return x ? static_cast<const C*>(x)[first + r] : C(0); };
    for (int64_t r = 0; r < tile; r++) {
      C delta = 0, change = 0, mu = 0;
      split_lse(r < count ? number(h.lse, r) : C(0), t.minus_lse[r], t.minus_lse_low[r]);
      if (r < count) {
        const C* g = t.grad + r * ldv;
        const T* out = static_cast<const T*>(h.out) + (first + r) * p.out_row;
        mu = number(d.lse, r);
        delta = S::dot(out, g, Dv) - number(h.grad_lse, r);
        change = S::dot(static_cast<const T*>(d.out) + (first + r) * d.out_row, g, Dv) - number(d.grad_lse, r);
        if (d.grad_out) change += S::dot(out, t.grad_tangent + r * ldv, Dv);
        if (grad_sink && h.sink != -__builtin_inf())
          *grad_sink -= __builtin_exp2((h.sink - double(number(h.lse, r))) * log2_e) *
                        ((d.sink - double(mu)) * double(delta) + double(change));
      }
      t.mu[r] = mu;
      t.minus_delta[r] = -delta;
      t.minus_delta_change[r] = -change;
    }
    memset(t.sum, 0, size_t(tile * ldk) * sizeof(C));
  }

  // Blocks [key][tile]. A negative P marks a dropped weight.
  struct Blocks {
    C *P, *P_change, *dP, *dS_change, *cap_tanh, *score_change;  // the last two null without softcap
  };

  // d(P) = P (A - mu). P_change holds the tangent of the mask, or nothing. A hidden NaN stays hidden.
  struct WeightStep {
    static constexpr bool hides = false;
    const QueryTile* t;
    Blocks b;
    bool added;
    C factor;
    ATTN_INLINE void clear(int64_t at) const {
      store(b.P_change + at, Vec<C>::zero());
      if (!b.cap_tanh) return;
      store(b.cap_tanh + at, Vec<C>::zero());
      store(b.score_change + at, Vec<C>::zero());
    }
    template <Hidden, int M, int N>
    ATTN_INLINE void finish(Tile<C, M, N>& x, int64_t lane0, int64_t, int64_t k) const {
      const Vec<C> f = Vec<C>::set(factor), zero = Vec<C>::zero();
      const auto at = [&](int r, int j) { return (k + r) * tile + lane0 + W * j; };
      if (b.cap_tanh) [[unlikely]]
        for (int r = 0; r < M; r++)
          for (int j = 0; j < N; j++) {
            const auto hidden = eq(load(b.P + at(r, j)), zero);
            const Vec<C> tanh = select(hidden, zero, load(b.cap_tanh + at(r, j)));
            store(b.cap_tanh + at(r, j), tanh);
            store(b.score_change + at(r, j), select(hidden, zero, x.a[r][j] * f));
            x.a[r][j] = x.a[r][j] * cap_slope(tanh);
          }
      ATTN_UNROLL for (int j = 0; j < N; j++) {
        const Vec<C> mu = load(t->mu + lane0 + W * j);
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          const Vec<C> marked = load(b.P + at(r, j)), w = max(marked, zero - marked);
          Vec<C> a = x.a[r][j] * f - mu;
          if (added) a = a + load(b.P_change + at(r, j));
          store(b.P_change + at(r, j), select(eq(w, zero), zero, w * a));
        }
      }
    }
  };

  template <bool Dropout>
  struct GradStep {  // dP <- dP - delta
    static constexpr bool hides = false;
    const QueryTile* t;
    Blocks b;
    ATTN_INLINE void clear(int64_t at) const { store(b.dP + at, Vec<C>::zero()); }
    template <Hidden, int M, int N>
    ATTN_INLINE void finish(Tile<C, M, N>& x, int64_t lane0, int64_t, int64_t k) const {
      const int64_t at = k * tile + lane0;
      ATTN_UNROLL for (int j = 0; j < N; j++) {
        const Vec<C> delta = load(t->minus_delta + lane0 + W * j);
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          Vec<C> y = x.a[r][j] + delta;
          if constexpr (Dropout) y = select(ge(load(b.P + at + r * tile + W * j), Vec<C>::zero()), y, delta);
          store(b.dP + at + r * tile + W * j, y);
        }
      }
    }
  };

  // d(dS) from d(dP); dP <- dS. Dropped weights leave P and d(P).
  template <bool Dropout>
  struct ChangeStep {
    static constexpr bool hides = false;
    const QueryTile* t;
    Blocks b;
    ATTN_INLINE void clear(int64_t at) const { store(b.dS_change + at, Vec<C>::zero()); }
    template <Hidden, int M, int N>
    ATTN_INLINE void finish(Tile<C, M, N>& x, int64_t lane0, int64_t, int64_t k) const {
      const Vec<C> zero = Vec<C>::zero();
      ATTN_UNROLL for (int j = 0; j < N; j++) {
        const Vec<C> delta_change = load(t->minus_delta_change + lane0 + W * j);
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          const int64_t at = (k + r) * tile + lane0 + W * j;
          Vec<C> w = load(b.P + at), y_change = x.a[r][j] + delta_change;
          const Vec<C> w_change = load(b.P_change + at), y = load(b.dP + at);
          if constexpr (Dropout) {
            const auto kept = ge(w, zero);
            y_change = select(kept, y_change, delta_change);
            store(b.P_change + at, select(kept, w_change, zero));
            store(b.P + at, max(zero, w));
            w = max(w, zero - w);
          }
          const auto hidden = eq(w, zero);
          store(b.dP + at, select(hidden, zero, w * y));
          store(b.dS_change + at, select(hidden, zero, fma(w_change, y, w * y_change)));
        }
      }
    }
  };

  // dS and d(dS) by the capped scores -> by the scores
  static ATTN_NOINLINE void through_softcap(const AttentionParams& p, const QueryTile& t, const TileKeys& seen,
                                            const Blocks& b) {
    const Vec<C> curvature = Vec<C>::set(C(-2 / p.softcap));  // f'' = -2 tanh f' / cap
    for (int64_t k = seen.begin; k < seen.end; k++)
      for (int64_t i = 0; i < t.vectors_used; i++) {
        const int64_t at = k * tile + i * W;
        const Vec<C> tanh = load(b.cap_tanh + at), slope = cap_slope(tanh), s = load(b.dP + at);
        const Vec<C> bend = curvature * tanh * load(b.score_change + at);
        store(b.dP + at, slope * s);
        store(b.dS_change + at, slope * fma(bend, s, load(b.dS_change + at)));
      }
  }

  struct KeyBlock {
    const C *K, *K_tangent, *V, *V_tangent;  // [key][ld]; tangents null where zero
    bool key_finite, tangent_finite;
  };

  // One query tile against one key block.
  template <class T, bool DropoutOn>
  static void tile_step(const AttentionParams& p, const QueryTile& t, const Wanted& w, const KeyBlock& x, int64_t k0,
                        int64_t block, const Blocks& b, C* grad_key, C* grad_value) {
    const HeadTangents& d = *t.tangents;
    const int64_t ldk = key_ld(p), ldv = value_ld(p), D = p.head_dim, Dv = p.v_head_dim;
    const auto weighed = S::template weigh<T>(p, t, x.K, k0, block, b.P, b.cap_tanh);
    const TileKeys& seen = weighed.seen;
    if (seen.empty()) return;
    if (DropoutOn) S::drop(p, t, k0, seen, w.scores(), b.P);

    const auto each = [&](const auto& product, const auto& step) {
      S::seen_product(p, product, t, step, step, false, k0, seen);
    };
    using Two = typename S::template Product<2>;
    const bool added = d.mask || d.slope != 0;
    if (added)
      load_tangent_bias<T>(p, d, t.first, t.count, k0 + seen.begin, seen.end - seen.begin,
                           b.P_change + seen.begin * tile, tile);
    each(Two{{d.query ? x.K : nullptr, x.K_tangent}, {t.tangent_t, t.query_t}, ldk, D},
         WeightStep{&t, b, added, tangent_factor<C>(p)});
    if (w.scores()) {
      each(typename S::template Product<1>{{x.V}, {t.grad_t}, ldv, Dv}, GradStep<DropoutOn>{&t, b});
      each(Two{{x.V_tangent, d.grad_out ? x.V : nullptr}, {t.grad_t, t.grad_tangent_t}, ldv, Dv},
           ChangeStep<DropoutOn>{&t, b});
    }

    const bool hidden = weighed.some_hidden();
    const auto sum_queries = [&](const C* A, const C* B, int64_t ld, bool finite, int64_t dim, C* out) {
      S::sum_queries(p, t, A, B, ld, hidden && !finite, k0, seen, dim, out);
    };
    const auto sum_keys = [&](const C* A, const C* B, bool finite) {
      S::sum_keys(p, t, A, B, ldk, D, hidden && !finite, k0, seen, block, t.sum);
    };
    if (w.value) {
      sum_queries(b.P_change, t.grad, ldv, t.grad_finite, Dv, grad_value);
      if (d.grad_out) sum_queries(b.P, t.grad_tangent, ldv, t.grad_tangent_finite, Dv, grad_value);
    }
    if (w.slope) *w.slope += S::slope_gradient(p, t, b.dS_change, k0, seen);
    if (w.mask) S::template mask_gradient<T>(t, w, b.dS_change, k0, seen, b.P);  // P has served
    if (!w.key && !w.query) return;
    if (b.cap_tanh) through_softcap(p, t, seen, b);
    if (w.key) {
      sum_queries(b.dS_change, t.query, ldk, t.query_finite, D, grad_key);
      if (d.query) sum_queries(b.dP, t.query_tangent, ldk, t.tangent_finite, D, grad_key);
    }
    if (w.query) {
      sum_keys(b.dS_change, x.K, x.key_finite);
      if (x.K_tangent) sum_keys(b.dP, x.K_tangent, x.tangent_finite);
    }
  }

  template <class T>
  struct Kernel {  // see attention/walk.h
    const Walk& walk;
    const HeadTangents* tangents;
    C* space;
    Space at;
    int64_t chunk;
    KeyBlock keys{};
    QueryTile tiles[Tuning::backward_max_tiles];

    Kernel(const Walk& w, const HeadTangents* d, C* s)
        : walk(w), tangents(d), space(s), at(w.params), chunk(chunk_tiles(w.params)) {}
    void prepare(int64_t i, int64_t head, int64_t first, int64_t count) {
      tiles[i] = place(walk.params, space + at.chunk + i * tile_numbers(walk.params));
      BackwardJvp::template prepare<T>(walk.params, walk.heads[head], tangents[head], first, count, tiles[i],
                                       walk.part == 0 ? walk.gradients[head].sink : nullptr);
    }
    void load(int64_t k0, int64_t block) {
      const AttentionParams& p = walk.params;
      const auto pack = [&](const void* X, int64_t row, int64_t dim, int64_t ld, int64_t to, bool& finite) -> const C* {
        if (!X) return nullptr;
        finite = pack_rows(static_cast<const T*>(X) + k0 * row, row, block, dim, space + to, ld, round_up(dim, W));
        return space + to;
      };
      bool any = true;
      const HeadPointers& h = walk.heads[0];
      const HeadTangents& d = tangents[0];
      keys.K = pack(h.key, p.k_row, p.head_dim, key_ld(p), at.key, keys.key_finite);
      keys.K_tangent = pack(d.key, d.k_row, p.head_dim, key_ld(p), at.key_tangent, keys.tangent_finite);
      keys.V = pack(h.value, p.v_row, p.v_head_dim, value_ld(p), at.value, any);
      keys.V_tangent = pack(d.value, d.v_row, p.v_head_dim, value_ld(p), at.value_tangent, any);
    }
    void step(int64_t i, const Wanted& w, int64_t k0, int64_t block, C* grad_key, C* grad_value) {
      const bool capped = walk.params.softcap > 0;
      const Blocks b{space + at.P,
                     space + at.P_change,
                     space + at.dP,
                     space + at.dS_change,
                     capped ? space + at.cap_tanh : nullptr,
                     capped ? space + at.score_change : nullptr};
      const auto go = walk.params.dropout.on() ? tile_step<T, true> : tile_step<T, false>;
      go(walk.params, tiles[i], w, keys, k0, block, b, grad_key, grad_value);
    }
    const C* query_sum(int64_t i) const { return tiles[i].sum; }
  };

  template <class T>
  static void run(const Walk& walk, const HeadTangents* tangents, C* space) {
    Kernel<T> kernel(walk, tangents, space);
    walk_keys<T>(walk, kernel, space + kernel.at.grad_key, space + kernel.at.grad_value);
  }
};

}  // namespace
}  // namespace attnjourney
