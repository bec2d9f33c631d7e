// The derivative of attention's backward in a direction; with no tangent of grad_out it is the double backward, too:
// the Hessian is symmetric. O(len) memory. With mu = d(lse) and d(out) known from the jvp:
//
//   A = d(score),  dP = V dO^T,  delta = rowsum(dO out) - grad_lse,  dS = P (dP - delta)
//   d(P) = P (A - mu),  d(dS) = d(P) (dP - delta) + P (d(dP) - d(delta))
//   d(dQ) = scale (d(dS) K + dS dK'),  d(dK) = scale (d(dS)^T Q + dS^T dQ'),  d(dV) = d(P)^T dO + P^T d(dO)
//
// where dQ', dK' are the tangents of Q and K. With a score modifier f: dS by the scores is f' dS, its derivative
// f' d(dS) + f'' d(score before f) dS. Dropout multiplies P and dP where the backward has it.
#pragma once
#include "tangent_stages.h"
#include "walk.h"

namespace attnjourney {
namespace {

template <class Real>
struct BackwardJvp : TileStages<Real> {
  using S = TileStages<Real>;
  using S::key_block, S::key_ld, S::line, S::tile, S::value_ld, S::width;
  using typename S::QueryRows, typename S::Wanted;

  struct ChangeTile : QueryRows {
    const HeadTangents* tangents;
    Real *tangent_t, *grad_t, *grad_tangent_t;          // panels, packed as Q^T is: dQ'^T, dO^T, d(dO)^T
    Real *query, *query_tangent, *grad, *grad_tangent;  // [tile][ld]
    Real* sum;                                          // [tile][key_ld]: d(dS) K + dS dK'
    Real *mu, *minus_delta, *minus_delta_change;        // [tile]
    bool query_finite, tangent_finite, grad_finite, grad_tangent_finite;
  };

  static void take_tile(const AttentionParams& params, Scratch& scratch, ChangeTile& queries) {
    const int64_t D = round_up(params.head_dim, line), Dv = round_up(params.v_head_dim, line);
    const auto take = [&](int64_t numbers) { return scratch.take<Real>(tile * numbers); };
    queries.query_t = take(D);
    queries.tangent_t = take(D);
    queries.grad_t = take(Dv);
    queries.grad_tangent_t = take(Dv);
    queries.query = take(key_ld(params));
    queries.query_tangent = take(key_ld(params));
    queries.sum = take(key_ld(params));
    queries.grad = take(value_ld(params));
    queries.grad_tangent = take(value_ld(params));
    S::take_rows(scratch, queries);
    queries.mu = take(1);
    queries.minus_delta = take(1);
    queries.minus_delta_change = take(1);
  }
  // Blocks [key][tile]. A negative P marks a dropped weight.
  struct Blocks {
    Real *P, *P_change, *dP, *dS_change, *states, *score_change;  // the last two null without a score modifier
  };
  struct Buffers {
    int64_t chunk;  // tiles
    KeySums<Real> sums;
    ChangeTile tiles[Tuning::backward_max_tiles];
    Blocks blocks;
    Real *key, *key_tangent, *value, *value_tangent;  // [key_block][ld]
    Real* out_t;                                      // panels [dim][panel]
    Buffers(const AttentionParams& params, Scratch& scratch)
        : chunk(S::template chunk_tiles<ChangeTile>(params, take_tile)), sums(params, scratch) {
      for (int64_t i = 0; i < chunk; i++) take_tile(params, scratch, tiles[i]);
      const auto block = [&](bool wanted) { return wanted ? scratch.take<Real>(key_block * tile) : nullptr; };
      const bool modified = params.modifier.on();
      blocks = {.P = block(true),
                .P_change = block(true),
                .dP = block(true),
                .dS_change = block(true),
                .states = block(modified),
                .score_change = block(modified)};
      key = scratch.take<Real>(key_block * key_ld(params));
      key_tangent = scratch.take<Real>(key_block * key_ld(params));
      value = scratch.take<Real>(key_block * value_ld(params));
      value_tangent = scratch.take<Real>(key_block * value_ld(params));
      out_t = scratch.take<Real>(tile * round_up(params.v_head_dim, line));
    }
  };
  static int64_t space(const AttentionParams& params) { return scratch_bytes<Buffers>(params); }

  // X as panels and as rows; tells whether every number is finite
  template <class T>
  static bool pack_both(const void* X, int64_t row, const ChangeTile& queries, int64_t dim, Real factor, Real* panels,
                        Real* rows, int64_t ld) {
    if (!X) return true;
    S::template pack_panels<T>(X, row, queries, dim, factor, panels);
    return pack_rows(static_cast<const T*>(X) + queries.first * row, row, queries.count, dim, rows, ld,
                     round_up(dim, width));
  }

  template <class T>
  static ATTN_NOINLINE void prepare(const AttentionParams& params, const HeadPointers& head,
                                    const HeadTangents& tangents, int64_t first, int64_t count, ChangeTile& queries,
                                    Real* out_t, double* grad_sink) {
    const int64_t D = params.head_dim, Dv = params.v_head_dim, ldk = key_ld(params), ldv = value_ld(params);
    const Real factor = query_factor<Real>(params), keep = Real(params.dropout.keep_scale);
    S::begin(params, head, first, count, queries);
    queries.tangents = &tangents;
    queries.query_finite =
        pack_both<T>(head.query, params.q_row, queries, D, factor, queries.query_t, queries.query, ldk);
    queries.tangent_finite =
        pack_both<T>(tangents.query, tangents.q_row, queries, D, factor, queries.tangent_t, queries.query_tangent, ldk);
    queries.grad_finite =
        pack_both<T>(head.grad_out, params.grad_out_row, queries, Dv, keep, queries.grad_t, queries.grad, ldv);
    queries.grad_tangent_finite = pack_both<T>(tangents.grad_out, tangents.grad_out_row, queries, Dv, keep,
                                               queries.grad_tangent_t, queries.grad_tangent, ldv);
    const auto number = [&](const void* x, int64_t r) { return x ? static_cast<const Real*>(x)[first + r] : Real(0); };
    S::template pack_out<T>(params, tangents.out, tangents.out_row, queries, out_t);
    S::products_of_rows(queries, out_t, queries.grad_t, Dv, queries.minus_delta_change);
    S::template pack_out<T>(params, head.out, params.out_row, queries, out_t);
    S::products_of_rows(queries, out_t, queries.grad_t, Dv, queries.minus_delta);
    if (tangents.grad_out)
      S::products_of_rows(queries, out_t, queries.grad_tangent_t, Dv, queries.minus_delta_change, true);
    for (int64_t r = 0; r < tile; r++) {
      Real delta = 0, change = 0, mu = 0;
      if (r < count) {
        mu = number(tangents.lse, r);
        delta = queries.minus_delta[r] - number(head.grad_lse, r);
        change = queries.minus_delta_change[r] - number(tangents.grad_lse, r);
        if (grad_sink && head.sink != -__builtin_inf())
          *grad_sink -=
              S::sink_weight_of(params, queries, r) * ((tangents.sink - double(mu)) * double(delta) + double(change));
      }
      queries.mu[r] = mu;
      queries.minus_delta[r] = -delta;
      queries.minus_delta_change[r] = -change;
    }
    memset(queries.sum, 0, size_t(tile * ldk) * sizeof(Real));
  }

  // d(P) = P (A - mu). P_change holds the tangent of the mask, or nothing. A hidden NaN stays hidden.
  struct WeightStep {
    static constexpr bool hides = false;
    const ChangeTile* queries;
    Blocks b;
    bool added;
    Real factor;
    Modifier<Real> modifier;
    ATTN_INLINE void clear(int64_t at) const {
      store(b.P_change + at, Vec<Real>::zero());
      if (!b.states) return;
      store(b.states + at, Vec<Real>::zero());
      store(b.score_change + at, Vec<Real>::zero());
    }
    template <Hidden, int M, int N>
    ATTN_INLINE void finish(Tile<Real, M, N>& x, int64_t lane0, int64_t, int64_t k) const {
      const Vec<Real> f = Vec<Real>::set(factor), zero = Vec<Real>::zero();
      const auto at = [&](int r, int j) { return (k + r) * tile + lane0 + width * j; };
      if (b.states) [[unlikely]]
        x.through([&](Real* products) {
          for (int r = 0; r < M; r++)
            for (int j = 0; j < N; j++, products += width) {
              const auto hidden = eq(load(b.P + at(r, j)), zero);
              const Vec<Real> state = select(hidden, zero, load(b.states + at(r, j))), product = load(products);
              store(b.states + at(r, j), state);
              store(b.score_change + at(r, j), select(hidden, zero, product * f));
              store(products, product * modifier.slope(state));
            }
        });
      ATTN_UNROLL for (int j = 0; j < N; j++) {
        const Vec<Real> mu = load(queries->mu + lane0 + width * j);
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          const Vec<Real> marked = load(b.P + at(r, j)), w = max(marked, zero - marked);
          Vec<Real> a = x.acc[r][j] * f;
          if (added) a = a + load(b.P_change + at(r, j));
          store(b.P_change + at(r, j), select(eq(w, zero), zero, w * (a - mu)));
        }
      }
    }
  };

  template <bool Dropout>
  struct GradStep {  // dP <- dP - delta
    static constexpr bool hides = false;
    const ChangeTile* queries;
    Blocks b;
    ATTN_INLINE void clear(int64_t at) const { store(b.dP + at, Vec<Real>::zero()); }
    template <Hidden, int M, int N>
    ATTN_INLINE void finish(Tile<Real, M, N>& x, int64_t lane0, int64_t, int64_t k) const {
      const int64_t at = k * tile + lane0;
      ATTN_UNROLL for (int j = 0; j < N; j++) {
        const Vec<Real> delta = load(queries->minus_delta + lane0 + width * j);
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          Vec<Real> y = x.acc[r][j] + delta;
          if constexpr (Dropout) y = select(ge(load(b.P + at + r * tile + width * j), Vec<Real>::zero()), y, delta);
          store(b.dP + at + r * tile + width * j, y);
        }
      }
    }
  };

  // d(dS) from d(dP); dP <- dS. Dropped weights leave P and d(P).
  template <bool Dropout>
  struct ChangeStep {
    static constexpr bool hides = false;
    const ChangeTile* queries;
    Blocks b;
    ATTN_INLINE void clear(int64_t at) const { store(b.dS_change + at, Vec<Real>::zero()); }
    template <Hidden, int M, int N>
    ATTN_INLINE void finish(Tile<Real, M, N>& x, int64_t lane0, int64_t, int64_t k) const {
      const Vec<Real> zero = Vec<Real>::zero();
      ATTN_UNROLL for (int j = 0; j < N; j++) {
        const Vec<Real> delta_change = load(queries->minus_delta_change + lane0 + width * j);
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          const int64_t at = (k + r) * tile + lane0 + width * j;
          Vec<Real> w = load(b.P + at), y_change = x.acc[r][j] + delta_change;
          const Vec<Real> w_change = load(b.P_change + at), y = load(b.dP + at);
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

  // dS and d(dS) by the modified scores -> by the scores
  static ATTN_NOINLINE void through_modifier(const AttentionParams& params, const ChangeTile& queries,
                                             const TileKeys& seen, const Blocks& b) {
    const ModifierBend<Real> bend(params.modifier);
    const Modifier<Real> modifier(params);
    for (int64_t k = seen.begin; k < seen.end; k++)
      for (int64_t i = 0; i < queries.vectors_used; i++) {
        const int64_t at = k * tile + i * width;
        const Vec<Real> state = load(b.states + at), slope = modifier.slope(state), s = load(b.dP + at);
        store(b.dP + at, slope * s);
        store(b.dS_change + at, slope * fma(bend.of(state, load(b.score_change + at)), s, load(b.dS_change + at)));
      }
  }

  struct KeyBlock {
    const Real *K, *K_tangent, *V, *V_tangent;  // [key][ld]; tangents null where zero
    bool key_finite, tangent_finite;
  };

  // One query tile against one key block.
  template <class T, bool DropoutOn>
  static void tile_step(const AttentionParams& params, const ChangeTile& queries, const Wanted& wanted,
                        const KeyBlock& x, int64_t k0, int64_t block, const Blocks& b, Real* grad_key,
                        Real* grad_value) {
    const HeadTangents& tangents = *queries.tangents;
    const int64_t ldk = key_ld(params), ldv = value_ld(params), D = params.head_dim, Dv = params.v_head_dim;
    const auto weights = S::template recompute_weights<T>(params, queries, x.K, k0, block, b.P, b.states);
    const TileKeys& seen = weights.seen;
    if (seen.empty()) return;
    if (DropoutOn) S::drop(params, queries, k0, seen, wanted.scores(), b.P);

    const auto each = [&](const auto& product, const auto& step) {
      S::seen_product(params, product, queries, step, step, false, k0, seen);
    };
    using Two = typename S::template Product<2>;
    const bool added = tangents.mask || tangents.slope != 0;
    if (added)
      load_tangent_bias<T>(params, tangents, queries.first, queries.count, k0 + seen.begin, seen.end - seen.begin,
                           b.P_change + seen.begin * tile, tile);
    each(Two{{tangents.query ? x.K : nullptr, x.K_tangent}, {queries.tangent_t, queries.query_t}, ldk, D},
         WeightStep{&queries, b, added, score_factor<Real>(params), Modifier<Real>(params)});
    if (wanted.scores()) {
      each(typename S::template Product<1>{{x.V}, {queries.grad_t}, ldv, Dv}, GradStep<DropoutOn>{&queries, b});
      each(Two{{x.V_tangent, tangents.grad_out ? x.V : nullptr}, {queries.grad_t, queries.grad_tangent_t}, ldv, Dv},
           ChangeStep<DropoutOn>{&queries, b});
    }

    const bool hidden = weights.some_hidden();
    const auto sum_queries = [&](const Real* A, const Real* B, int64_t ld, bool finite, int64_t dim, Real* out) {
      S::sum_queries(params, queries, A, B, ld, hidden && !finite, k0, seen, dim, out);
    };
    const auto sum_keys = [&](const Real* A, const Real* B, bool finite) {
      S::sum_keys(params, queries, A, B, ldk, D, hidden && !finite, k0, seen, block, queries.sum);
    };
    if (wanted.value) {
      sum_queries(b.P_change, queries.grad, ldv, queries.grad_finite, Dv, grad_value);
      if (tangents.grad_out) sum_queries(b.P, queries.grad_tangent, ldv, queries.grad_tangent_finite, Dv, grad_value);
    }
    if (wanted.slope) *wanted.slope += S::slope_gradient(params, queries, b.dS_change, k0, seen);
    if (wanted.mask) S::template mask_gradient<T>(queries, wanted, b.dS_change, k0, seen, b.P);  // P has served
    if (!wanted.key && !wanted.query) return;
    if (b.states) through_modifier(params, queries, seen, b);
    if (wanted.key) {
      sum_queries(b.dS_change, queries.query, ldk, queries.query_finite, D, grad_key);
      if (tangents.query) sum_queries(b.dP, queries.query_tangent, ldk, queries.tangent_finite, D, grad_key);
    }
    if (wanted.query) {
      sum_keys(b.dS_change, x.K, x.key_finite);
      if (x.K_tangent) sum_keys(b.dP, x.K_tangent, x.tangent_finite);
    }
  }

  template <class T>
  struct Kernel {  // see attention/walk.h
    const Walk& walk;
    const HeadTangents* tangents;
    Buffers buffers;
    int64_t chunk = buffers.chunk;
    KeyBlock keys{};

    Kernel(const Walk& walk_, const HeadTangents* tangents_, void* space)
        : walk(walk_), tangents(tangents_), buffers(buffers_in<Buffers>(space, walk_.params)) {}
    void prepare(int64_t i, int64_t head, int64_t first, int64_t count) {
      BackwardJvp::template prepare<T>(walk.params, walk.heads[head], tangents[head], first, count, buffers.tiles[i],
                                       buffers.out_t, walk.part == 0 ? walk.gradients[head].sink : nullptr);
    }
    void load(int64_t k0, int64_t block) {
      const AttentionParams& params = walk.params;
      const auto pack = [&](const void* X, int64_t row, int64_t dim, int64_t ld, Real* to,
                            bool& finite) -> const Real* {
        if (!X) return nullptr;
        finite = pack_rows(static_cast<const T*>(X) + k0 * row, row, block, dim, to, ld, round_up(dim, width));
        return to;
      };
      bool any = true;
      const HeadPointers& head = walk.heads[0];
      const HeadTangents& changes = tangents[0];
      keys.K = pack(head.key, params.k_row, params.head_dim, key_ld(params), buffers.key, keys.key_finite);
      keys.K_tangent =
          pack(changes.key, changes.k_row, params.head_dim, key_ld(params), buffers.key_tangent, keys.tangent_finite);
      keys.V = pack(head.value, params.v_row, params.v_head_dim, value_ld(params), buffers.value, any);
      keys.V_tangent =
          pack(changes.value, changes.v_row, params.v_head_dim, value_ld(params), buffers.value_tangent, any);
    }
    void step(int64_t i, const Wanted& wanted, int64_t, int64_t k0, int64_t block) {
      const auto go = walk.params.dropout.on() ? tile_step<T, true> : tile_step<T, false>;
      go(walk.params, buffers.tiles[i], wanted, keys, k0, block, buffers.blocks, buffers.sums.key_rows(k0),
         buffers.sums.value_rows(k0));
    }
    static int64_t key_step(const AttentionParams& params) { return S::key_step(params); }
    void clear(int64_t) const { buffers.sums.clear(); }
    static const uint8_t* kept_queries(int64_t, int64_t) { return nullptr; }
    static const uint8_t* kept_keys(int64_t) { return nullptr; }
    const Real* key_sum(int64_t, int64_t k0, int64_t) const { return buffers.sums.key_rows(k0); }
    const Real* value_sum(int64_t, int64_t k0, int64_t) const { return buffers.sums.value_rows(k0); }
    const Real* query_sum(int64_t i) const { return buffers.tiles[i].sum; }
  };

  template <class T>
  static void run(const Walk& walk, const HeadTangents* tangents, void* space) {
    Kernel<T> kernel(walk, tangents, space);
    walk_keys<T>(walk, kernel);
  }
};

}  // namespace
}  // namespace attnjourney
