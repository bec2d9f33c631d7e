// Attention backward (Dao et al. 2022, arXiv 2205.14135): P is recomputed, O(len) memory.
//
// S^T = K Q^T and dP^T = V dO^T have lanes over queries, so exp2 and P * (dP - delta) are vertical; dV = P^T dO,
// dK = dS^T Q and dQ = dS K have lanes over head_dim.
#pragma once
#include "gradient_step.h"
#include "walk.h"

namespace attnjourney {
namespace {

template <class Real>
struct Backward : TileStages<Real> {
  using S = TileStages<Real>;
  using S::key_block, S::key_ld, S::line, S::tile, S::value_ld, S::width;
  using typename S::QueryRows, typename S::Wanted;

  struct BackwardTile : QueryRows {
    Real* grad_t;              // panels [dim][panel]: dO / (1 - dropout_p)
    const Real *query, *grad;  // [tile][ld]
    int64_t query_ld, grad_ld;
    Real *query_copy, *grad_copy;
    Real* grad_query;   // [tile][ld], sum of dS K
    Real* minus_delta;  // [tile]
    bool query_finite, grad_finite;
  };

  static void take_tile(const AttentionParams& params, Scratch& scratch, BackwardTile& queries) {
    queries.query_t = scratch.take<Real>(tile * round_up(params.head_dim, line));
    queries.grad_t = scratch.take<Real>(tile * round_up(params.v_head_dim, line));
    queries.grad_query = scratch.take<Real>(tile * key_ld(params));
    S::take_rows(scratch, queries);
    queries.minus_delta = scratch.take<Real>(tile);
    queries.query_copy = scratch.take<Real>(tile * key_ld(params));
    queries.grad_copy = scratch.take<Real>(tile * value_ld(params));
  }
  struct Buffers {
    int64_t chunk;  // tiles
    KeySums<Real> sums;
    BackwardTile tiles[Tuning::backward_max_tiles];
    Real *P, *dS, *states;  // [key_block][tile]; the last one of the score modifier, or null
    Real *key, *value;      // [key_block][ld]
    Real* out_t;            // panels [dim][panel]
    Buffers(const AttentionParams& params, Scratch& scratch)
        : chunk(S::template chunk_tiles<BackwardTile>(params, take_tile)), sums(params, scratch) {
      for (int64_t i = 0; i < chunk; i++) take_tile(params, scratch, tiles[i]);
      P = scratch.take<Real>(key_block * tile);
      dS = scratch.take<Real>(key_block * tile);
      states = params.modifier.on() ? scratch.take<Real>(key_block * tile) : nullptr;
      key = scratch.take<Real>(key_block * key_ld(params));
      value = scratch.take<Real>(key_block * value_ld(params));
      out_t = scratch.take<Real>(tile * round_up(params.v_head_dim, line));
    }
  };
  static int64_t space(const AttentionParams& params) { return scratch_bytes<Buffers>(params); }

  // Rows of X in compute precision: in place where they are dense, else copied to Y
  template <class T>
  static ATTN_INLINE const Real* rows_of(const T* X, int64_t ld, int64_t rows, int64_t dim, Real* Y, int64_t ldy,
                                         int64_t& ld_of_rows) {
    if (sizeof(T) == sizeof(Real) && ld == dim && dim % width == 0)
      return ld_of_rows = ld, reinterpret_cast<const Real*>(X);
    pack_rows(X, ld, rows, dim, Y, ldy, round_up(dim, width));
    return ld_of_rows = ldy, Y;
  }

  template <class T>
  static ATTN_NOINLINE void prepare(const AttentionParams& params, const HeadPointers& head, int64_t first,
                                    int64_t count, BackwardTile& queries, Real* out_t, double* grad_sink) {
    const int64_t D = params.head_dim, Dv = params.v_head_dim;
    const T* q = static_cast<const T*>(head.query) + first * params.q_row;
    const T* g = static_cast<const T*>(head.grad_out) + first * params.grad_out_row;
    S::begin(params, head, first, count, queries);
    queries.query_finite =
        S::template pack_panels<T>(head.query, params.q_row, queries, D, query_factor<Real>(params), queries.query_t);
    queries.grad_finite = S::template pack_panels<T>(head.grad_out, params.grad_out_row, queries, Dv,
                                                     Real(params.dropout.keep_scale), queries.grad_t);
    queries.query = rows_of(q, params.q_row, count, D, queries.query_copy, key_ld(params), queries.query_ld);
    queries.grad = rows_of(g, params.grad_out_row, count, Dv, queries.grad_copy, value_ld(params), queries.grad_ld);
    const bool exact = S::some_of_one_key(queries);  // their dP - delta is to be 0
    if (exact) {
      S::template pack_out<T>(params, head.out, params.out_row, queries, out_t);
      S::products_of_rows(queries, out_t, queries.grad_t, Dv, queries.minus_delta);
    }
    const T* const out = static_cast<const T*>(head.out) + first * params.out_row;
    for (int64_t r = 0; r < tile; r++) {
      Real delta = 0;
      if (r < count) {
        delta =
            exact ? queries.minus_delta[r] : S::dot(out + r * params.out_row, queries.grad + r * queries.grad_ld, Dv);
        if (head.grad_lse) delta -= static_cast<const Real*>(head.grad_lse)[first + r];
      }
      if (grad_sink && r < count && head.sink != -__builtin_inf())
        *grad_sink -= S::sink_weight_of(params, queries, r) * double(delta);
      queries.minus_delta[r] = -delta;
    }
    memset(queries.grad_query, 0, size_t(tile * key_ld(params)) * sizeof(Real));
  }

  // One query tile against one key block.
  template <class T, bool DropoutOn>
  static void tile_step(const AttentionParams& params, const BackwardTile& queries, const Wanted& wanted,
                        const Buffers& buffers, bool key_finite, int64_t k0, int64_t block) {
    Real *const P = buffers.P, *const dS = buffers.dS, *const states = buffers.states;
    const Real *const K = buffers.key, *const V = buffers.value;
    const auto weights =
        S::template recompute_weights<T>(params, queries, K, k0, block, P, wanted.scores() ? states : nullptr);
    const TileKeys& seen = weights.seen;
    if (seen.empty()) return;
    if (DropoutOn) S::drop(params, queries, k0, seen, wanted.scores(), P);
    if (wanted.scores()) {
      const typename S::template Product<1> grad{{V}, {queries.grad_t}, value_ld(params), params.v_head_dim};
      const GradientStep<Real, tile, DropoutOn, true> careful{queries.minus_delta, P, dS};
      if (weights.bias)
        S::seen_product(params, grad, queries, careful, careful, true, k0, seen);
      else
        S::seen_product(params, grad, queries, careful,
                        GradientStep<Real, tile, DropoutOn, false>{queries.minus_delta, P, dS}, false, k0, seen);
    }

    const bool hidden = weights.some_hidden();
    if (wanted.value)
      S::sum_queries(params, queries, P, queries.grad, queries.grad_ld, hidden && !queries.grad_finite, k0, seen,
                     params.v_head_dim, buffers.sums.value_rows(k0));
    if (wanted.slope) *wanted.slope += S::slope_gradient(params, queries, dS, k0, seen);
    if (wanted.mask) S::template mask_gradient<T>(queries, wanted, dS, k0, seen, P);  // P has served
    if (states && (wanted.key || wanted.query))
      through_modifier<tile>(Modifier<Real>(params), queries.vectors_used, states, seen, dS);
    if (wanted.key)
      S::sum_queries(params, queries, dS, queries.query, queries.query_ld, hidden && !queries.query_finite, k0, seen,
                     params.head_dim, buffers.sums.key_rows(k0));
    if (wanted.query)
      S::sum_keys(params, queries, dS, K, key_ld(params), params.head_dim, hidden && !key_finite, k0, seen, block,
                  queries.grad_query);
  }

  template <class T>
  struct Kernel {  // see attention/walk.h
    const Walk& walk;
    Buffers buffers;
    int64_t chunk = buffers.chunk, used = 0;  // tiles
    bool key_finite = true;

    Kernel(const Walk& walk_, void* space) : walk(walk_), buffers(buffers_in<Buffers>(space, walk_.params)) {}
    void prepare(int64_t i, int64_t head, int64_t first, int64_t count) {
      used = i + 1;
      Backward::template prepare<T>(walk.params, walk.heads[head], first, count, buffers.tiles[i], buffers.out_t,
                                    walk.part == 0 ? walk.gradients[head].sink : nullptr);
    }
    void load(int64_t k0, int64_t block) {
      const AttentionParams& params = walk.params;
      key_finite = pack_rows(static_cast<const T*>(walk.heads[0].key) + k0 * params.k_row, params.k_row, block,
                             params.head_dim, buffers.key, key_ld(params), round_up(params.head_dim, width));
      pack_rows(static_cast<const T*>(walk.heads[0].value) + k0 * params.v_row, params.v_row, block, params.v_head_dim,
                buffers.value, value_ld(params), round_up(params.v_head_dim, width));
    }
    void step(int64_t i, const Wanted& wanted, int64_t, int64_t k0, int64_t block) {
      RowPrefetch prefetch;
      prefetch_masks<T>(walk.params, buffers.tiles, i, used, wanted, k0, block, key_block, prefetch);
      const auto go = walk.params.dropout.on() ? tile_step<T, true> : tile_step<T, false>;
      go(walk.params, buffers.tiles[i], wanted, buffers, key_finite, k0, block);
      buffers.tiles[i].prefetch = nullptr;
    }
    static int64_t key_step(const AttentionParams& params) { return S::key_step(params); }
    void clear(int64_t) const { buffers.sums.clear(); }
    static const uint8_t* kept_queries(int64_t, int64_t) { return nullptr; }
    static const uint8_t* kept_keys(int64_t) { return nullptr; }
    const Real* key_sum(int64_t, int64_t k0, int64_t) const { return buffers.sums.key_rows(k0); }
    const Real* value_sum(int64_t, int64_t k0, int64_t) const { return buffers.sums.value_rows(k0); }
    const Real* query_sum(int64_t i) const { return buffers.tiles[i].grad_query; }
  };

  template <class T>
  static void run(const Walk& walk, void* space) {
    Kernel<T> kernel(walk, space);
    walk_keys<T>(walk, kernel);
  }
};

}  // namespace
}  // namespace attnjourney
