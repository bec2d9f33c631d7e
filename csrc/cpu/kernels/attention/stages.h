// The stages that attention's derivatives are made of, a tile of queries against a block of keys: recomputed weights P,
// products with lanes over queries, sums over keys and over queries, gradients of masks and slopes; and the walk over
// query chunks and key blocks. Tiles are [key][tile], keys down, lanes over queries.
#pragma once
#include "attention/params.h"
#include "cpu/kernels/common/dropout_tile.h"
#include "cpu/kernels/common/exp2.h"
#include "cpu/kernels/common/log_sum.h"
#include "cpu/kernels/common/mask_tile.h"
#include "cpu/kernels/common/pack.h"
#include "cpu/kernels/common/softcap.h"
#include "cpu/kernels/common/tile.h"
#include "key_walk.h"

namespace attnjourney {
namespace {

template <class C>
struct Stages {
  static constexpr int W = Vec<C>::width;
  static constexpr int rows = Tuning::rows, vectors = Tuning::vectors;
  static constexpr int64_t panel = vectors * W;
  static constexpr int64_t tile = Tuning::backward_panels * panel;  // queries
  static constexpr int64_t key_block = Tuning::backward_keys;
  static constexpr int64_t line =
      64 / int64_t(sizeof(C));  // one cache line between rows: no collisions at powers of two

  static int64_t key_ld(const AttentionParams& p) { return round_up(p.head_dim, line) + line; }
  static int64_t value_ld(const AttentionParams& p) { return round_up(p.v_head_dim, line) + line; }
  // queries and keys at a time: fewer where a mask of blocks has its borders
  static int64_t query_step(const AttentionParams& p) { return p.block_size ? block_step(p.block_size, tile) : tile; }
  static int64_t key_step(const AttentionParams& p) {
    return p.block_size ? block_step(p.block_size, key_block) : key_block;
  }
  static int64_t tiles_per_head(const AttentionParams& p) { return (p.q_len + query_step(p) - 1) / query_step(p); }

  // What every kernel knows of its query tile.
  struct QueryRows {
    C* query_t;                    // panels [dim][panel]: query_factor * Q
    C *minus_lse, *minus_lse_low;  // [tile]; their sum is -lse in log2 units, beyond the precision of one number
    const HeadPointers* head;
    int64_t first, count;  // rows
    int64_t vectors_used;
    Ahead* ahead;  // a step with each group of keys, or null
  };

  static void begin(const HeadPointers& h, int64_t first, int64_t count, QueryRows& t) {
    t.head = &h;
    t.first = first;
    t.count = count;
    t.vectors_used = (count + W - 1) / W;
    t.ahead = nullptr;
  }
  template <class T>
  static bool pack_panels(const void* X, int64_t ld, const QueryRows& t, int64_t dim, C factor, C* Y) {
    return pack_transposed_by(static_cast<const T*>(X) + t.first * ld, ld, t.count, dim, TimesFinite<C>{{factor}}, Y,
                              panel, panel * dim, panel)
        .seen.all();
  }

  // sum over n numbers of x y
  template <class X, class Y>
  static C dot(const X* x, const Y* y, int64_t n) {
    Vec<C> s = Vec<C>::zero();
    int64_t d = 0;
    for (; d + W <= n; d += W) s = fma(load(x + d), load(y + d), s);
    C total = sum(s);
    for (; d < n; d++) total += C(load_one(x + d)) * C(load_one(y + d));
    return total;
  }

  // ---- products with lanes over queries, each finished by a step on the accumulators

  // The sum of up to Terms products X[key][ld] times panels Y [dim][panel]; a term without X counts nothing.
  template <int Terms>
  struct Product {
    const C *X[Terms], *Y[Terms];
    int64_t ld, dim;
  };

  // M keys against N vectors of panel p, from vector v on
  template <Hidden H, int M, int N, int Terms, class Step>
  static ATTN_INLINE void product(const Product<Terms>& x, const Step& step, int64_t p, int64_t v, int64_t key,
                                  int64_t k) {
    Tile<C, M, N> t;
    t.clear();
    for (int i = 0; i < Terms; i++)
      if (Terms == 1 || x.X[i]) t.add_rows(x.X[i] + k * x.ld, x.ld, x.Y[i] + p * panel * x.dim + v * W, panel, x.dim);
    step.template finish<H>(t, p * panel + v * W, key, k);
  }
  // ... against all panels
  template <Hidden H, int M, int Terms, class Step>
  static ATTN_NOINLINE void against_panels(const Product<Terms>& x, int64_t vectors_used, const Step& step, int64_t key,
                                           int64_t k) {
    int64_t p = 0;
    for (; (p + 1) * vectors <= vectors_used; p++) product<H, M, vectors>(x, step, p, 0, key, k);
    if constexpr (vectors > 1)
      if (p * vectors < vectors_used)
        with_rows<vectors - 1>(vectors_used - p * vectors,
                               [&](auto n) { product<H, M, n.count>(x, step, p, 0, key, k); });
  }
  // ... against n vectors of one panel
  template <Hidden H, int M, int Terms, class Step>
  static ATTN_NOINLINE void against_panel(const Product<Terms>& x, const Step& step, int64_t p, int64_t v, int64_t n,
                                          int64_t key, int64_t k) {
    with_rows<vectors>(n, [&](auto n_) { product<H, M, n_.count>(x, step, p, v, key, k); });
  }

  // One product for keys [begin, end) of the block, none of which the ranges hide
  template <Hidden H, int Terms, class Step>
  static ATTN_INLINE void inner(const Product<Terms>& x, const QueryRows& t, const Step& step, int64_t k0,
                                int64_t begin, int64_t end) {
    split_rows<rows>(end - begin, [&](int64_t k, auto m) {
      against_panels<H, m.count>(x, t.vectors_used, step, k0 + begin + k, begin + k);
      if (t.ahead) t.ahead->step();
    });
  }

  // Keys [begin, end) of the block, seen by some rows only: f(key, keys, panel, first vector, vectors) for the vectors
  // of rows that see any of a group of keys, clear(offset) for the others.
  template <class Clear, class F>
  static ATTN_INLINE void border(const AttentionParams& p, const QueryRows& t, int64_t k0, int64_t begin, int64_t end,
                                 const Clear& clear, const F& f) {
    for (int64_t k = begin; k < end; k += rows) {
      const int64_t m = min_of(rows, end - k);
      for (int64_t q = 0; q * vectors < t.vectors_used; q++) {
        const SeenLanes lanes =
            seen_lanes<W>(p.keys, t.first + q * panel, min_of(panel, t.count - q * panel), k0 + k, m);
        for (int64_t r = 0; r < m; r++) {
          const int64_t at = (k + r) * tile + q * panel;
          for (int64_t j = 0; j < lanes.begin; j++) clear(at + W * j);
          for (int64_t j = lanes.end; j < vectors; j++) clear(at + W * j);
        }
        if (lanes.begin < lanes.end) f(k, m, q, lanes.begin, lanes.end - lanes.begin);
      }
    }
  }
  // One product there
  template <int Terms, class Step>
  static ATTN_NOINLINE void border_product(const AttentionParams& p, const Product<Terms>& x, const QueryRows& t,
                                           const Step& step, bool bias, int64_t k0, int64_t begin, int64_t end) {
    border(
        p, t, k0, begin, end, [&](int64_t at) { step.clear(at); },
        [&](int64_t k, int64_t m, int64_t q, int64_t v, int64_t n) {
          with_rows<rows>(m, [&](auto m_) {
            if constexpr (!Step::hides)
              against_panel<Hidden::no, m_.count>(x, step, q, v, n, k0 + k, k);
            else if (bias)
              against_panel<Hidden::by_bias, m_.count>(x, step, q, v, n, k0 + k, k);
            else
              against_panel<Hidden::by_range, m_.count>(x, step, q, v, n, k0 + k, k);
          });
        });
  }
  // One product for all keys of `seen`, the two borders finished by `careful`. In the order of the keys: what a step
  // sums over them does not depend on where the borders lie.
  template <int Terms, class Careful, class Step>
  static void seen_product(const AttentionParams& p, const Product<Terms>& x, const QueryRows& t,
                           const Careful& careful, const Step& step, bool bias, int64_t k0, const TileKeys& seen) {
    border_product(p, x, t, careful, bias, k0, seen.begin, seen.all_begin);
    const bool biased = Step::hides && bias;
    if constexpr (Step::hides)
      if (biased) inner<Hidden::by_bias>(x, t, step, k0, seen.all_begin, seen.all_end);
    if (!biased) inner<Hidden::no>(x, t, step, k0, seen.all_begin, seen.all_end);
    border_product(p, x, t, careful, bias, k0, seen.all_end, seen.end);
  }

  // P = exp2(S - lse), of a tile of M keys and N vectors of queries
  struct ScoreStep {
    static constexpr bool hides = true;
    const AttentionParams* params;
    const QueryRows* t;
    C* P;
    C* cap_tanh;  // [key][tile]: with softcap, tanh of what was capped; or null
    ATTN_INLINE void clear(int64_t at) const { store(P + at, Vec<C>::zero()); }
    template <int M, int N>
    ATTN_INLINE void capped(C* x, int64_t at) const {
      const C cap = C(params->softcap * log2_e);
      if (!cap_tanh) return cap_scores(x, M * N, cap);
      alignas(64) C tanh[M * N * W];
      cap_scores(x, M * N, cap, tanh);
      ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
          store(cap_tanh + at + r * tile + W * j, load(tanh + (r * N + j) * W));
    }
    template <Hidden H, int M, int N>
    ATTN_INLINE void finish(Tile<C, M, N>& x, int64_t lane0, int64_t key, int64_t k) const {
      C* out = P + k * tile + lane0;
      if (params->softcap > 0) [[unlikely]]
        x.through([&](C* scores) { capped<M, N>(scores, k * tile + lane0); });
      LaneRange<C> range[M];
      if constexpr (H == Hidden::by_range)
        for (int r = 0; r < M; r++) range[r] = lane_range<C>(params->keys, t->first + lane0, key + r);
      const Vec<C> hidden = Vec<C>::set(-C(__builtin_inff()));
      ATTN_UNROLL for (int j = 0; j < N; j++) {
        const Vec<C> lse = load(t->minus_lse + lane0 + W * j), low = load(t->minus_lse_low + lane0 + W * j);
        const Vec<C> lane = Vec<C>::iota() + Vec<C>::set(C(W * j));
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          Vec<C> w;
          if constexpr (H == Hidden::by_bias) {
            const Vec<C> bias = load(out + r * tile + W * j);
            w = select(eq(bias, hidden), Vec<C>::zero(), exp2((x.a[r][j] + bias) + lse + low));
          } else {
            w = exp2((x.a[r][j] + lse) + low);
            if constexpr (H == Hidden::by_range) w = select(range[r].visible(lane), w, Vec<C>::zero());
          }
          store(out + r * tile + W * j, w);
        }
      }
    }
  };

  // The weights P of all keys of a block that the tile sees (K: [key][key_ld]), and which those are
  struct Weighed {
    TileKeys seen;  // empty: nothing to do
    bool bias;      // P came from an additive block, which may hide keys anywhere
    bool some_hidden() const { return bias || seen.all_begin > seen.begin || seen.all_end < seen.end; }
  };
  template <class T>
  static Weighed weigh(const AttentionParams& p, const QueryRows& t, const C* K, int64_t k0, int64_t block, C* P,
                       C* cap_tanh) {
    constexpr TileKeys none{0, 0, 0, 0};
    const TileKeys seen = seen_keys(p, *t.head, t.first, t.first + t.count - 1, k0, block);
    if (seen.empty()) return {none, false};
    MaskBlock masked = MaskBlock::all_visible;
    if (p.mask != MaskKind::none || p.alibi) masked = load_bias<T>(p, *t.head, t.first, t.count, k0, seen, P, tile);
    if (masked == MaskBlock::all_hidden) return {none, false};
    const bool bias = has_block(masked);
    const ScoreStep score{&p, &t, P, cap_tanh};
    seen_product(p, Product<1>{{K}, {t.query_t}, key_ld(p), p.head_dim}, t, score, score, bias, k0, seen);
    return {seen, bias};
  }
  // Dropout on them; see drop_tile
  static void drop(const AttentionParams& p, const QueryRows& t, int64_t k0, const TileKeys& seen, bool mark, C* P) {
    const auto drop_border = [&](int64_t begin, int64_t end) {
      border(
          p, t, k0, begin, end, [](int64_t) {},
          [&](int64_t k, int64_t m, int64_t q, int64_t v, int64_t n) {
            const int64_t lane = q * panel + v * W;
            drop_tile(p.dropout, t.head->index, t.first + lane, min_of(t.count - lane, n * W), k0, k, k + m, mark,
                      P + lane, tile);
          });
    };
    drop_border(seen.begin, seen.all_begin);
    drop_border(seen.all_end, seen.end);
    if (seen.all_begin < seen.all_end)
      drop_tile(p.dropout, t.head->index, t.first, t.count, k0, seen.all_begin, seen.all_end, mark, P, tile);
  }

  // ---- sums with lanes over head_dim

  template <int M>
  static ATTN_NOINLINE void add_over_queries(const C* A, const C* B, int64_t ldb, int64_t n, int64_t columns, C* out,
                                             int64_t ldo) {
    split_columns<C, vectors>(columns, [&](int64_t d, auto n_) {
      Tile<C, M, n_.count> t;
      t.clear();
      t.add_rows(A, tile, B + d, ldb, n);
      t.add(out + d, ldo);
      t.store_to(out + d, ldo);
    });
  }
  // out[k][round_up(dim, line)] += sum over the tile's queries of A[k][q] B[q]
  static void sum_queries(const AttentionParams& p, const QueryRows& t, const C* A, const C* B, int64_t ldb,
                          bool guarded, int64_t k0, const TileKeys& seen, int64_t dim, C* out) {
    const int64_t ldo = round_up(dim, line);
    if (guarded) {
      add_guarded(A + seen.begin * tile, 1, tile, seen.end - seen.begin, B, ldb, t.count, dim, out + seen.begin * ldo,
                  ldo);
      return;
    }
    split_rows<rows>(seen.end - seen.begin, [&](int64_t k_, auto m) {
      const int64_t k = seen.begin + k_;
      const KeyRange r = p.keys.rows(k0 + k, k0 + k + m.count - 1, p.q_len);
      const int64_t from = max_of(0, r.begin - t.first), to = min_of(t.count, r.end - t.first);
      if (t.ahead) t.ahead->step();
      if (from < to)
        add_over_queries<m.count>(A + k * tile + from, B + from * ldb, ldb, to - from, round_up(dim, W), out + k * ldo,
                                  ldo);
    });
  }
  template <int M>
  static ATTN_NOINLINE void add_over_keys(const C* A, const C* B, int64_t ldb, int64_t n, int64_t columns, C* out,
                                          int64_t ldo) {
    split_columns<C, vectors>(columns, [&](int64_t d, auto n_) {
      Tile<C, M, n_.count> t;
      t.clear();
      t.add_columns(A, tile, B + d, ldb, n);
      t.add(out + d, ldo);
      t.store_to(out + d, ldo);
    });
  }
  // out[q][ld] += sum over the keys seen of A[k][q] B[k][ld]
  static void sum_keys(const AttentionParams& p, const QueryRows& t, const C* A, const C* B, int64_t ld, int64_t dim,
                       bool guarded, int64_t k0, const TileKeys& seen, int64_t block, C* out) {
    if (guarded) {
      add_guarded(A + seen.begin * tile, tile, 1, t.count, B + seen.begin * ld, ld, seen.end - seen.begin, dim, out,
                  ld);
      return;
    }
    split_rows<rows>(t.count, [&](int64_t r, auto m) {
      const TileKeys mine = tile_keys(p.keys, t.first + r, t.first + r + m.count - 1, k0, block);
      const int64_t begin = max_of(mine.begin, seen.begin), n = min_of(mine.end, seen.end) - begin;
      if (n > 0)
        add_over_keys<m.count>(A + begin * tile + r, B + begin * ld, ld, n, round_up(dim, W), out + r * ld, ld);
    });
  }

  // ---- gradients of masks and slopes

  struct Wanted {
    bool query, key, value;
    void* mask;  // see HeadGradients
    int64_t mask_row, mask_col;
    bool mask_first, mask_once;
    double* slope;                                                 // of ALiBi, or null
    bool scores() const { return query || key || mask || slope; }  // dS is needed
  };

  // m <= W rows of n numbers from dS[key][tile]: written, or added to what is there
  template <bool Write, class To>
  static ATTN_INLINE void transpose_into(const C* dS, int64_t n, int64_t m, To* to, int64_t ld) {
    int64_t k = 0;
    for (; k + W <= n; k += W) {
      Vec<C> t[W];
      ATTN_UNROLL for (int i = 0; i < W; i++) t[i] = load(dS + (k + i) * tile);
      transpose(t);
      for (int64_t i = 0; i < m; i++) store(to + i * ld + k, Write ? t[i] : load(to + i * ld + k) + t[i]);
    }
    for (; k < n; k++)
      for (int64_t i = 0; i < m; i++)
        store_one(to + i * ld + k, dS[k * tile + i] + (Write ? C(0) : C(load_one(to + i * ld + k))));
  }
  // Rows past the last one and hidden keys have dS 0. T: the dtype of query
  template <class T>
  static ATTN_NOINLINE void mask_gradient(const QueryRows& t, const Wanted& w, const C* dS, int64_t k0,
                                          const TileKeys& seen, C* buffer) {
    const int64_t n = seen.end - seen.begin, at = t.first * w.mask_row + (k0 + seen.begin) * w.mask_col;
    dS += seen.begin * tile;
    if (w.mask_once) {
      T* mask = static_cast<T*>(w.mask) + at;
      for (int64_t r = 0; r < t.count; r += W)
        transpose_into<true>(dS + r, n, min_of(W, t.count - r), mask + r * w.mask_row, w.mask_row);
      return;
    }
    C* mask = static_cast<C*>(w.mask) + at;
    if (w.mask_row == 0) {  // one value for all rows
      for (int64_t k = 0; k < n; k++) {
        Vec<C> s = Vec<C>::zero();
        for (int64_t i = 0; i < t.vectors_used; i++) s = s + load(dS + k * tile + i * W);
        mask[k * w.mask_col] += sum(s);
      }
      return;
    }
    for (int64_t r = 0; r < t.count; r += W) {
      const int64_t m = min_of(W, t.count - r);
      if (w.mask_col == 0) {  // one value for all keys
        Vec<C> s = Vec<C>::zero();
        for (int64_t k = 0; k < n; k++) s = s + load(dS + k * tile + r);
        store(buffer, s);
        for (int64_t i = 0; i < m; i++) mask[(r + i) * w.mask_row] += buffer[i];
        continue;
      }
      C* to = mask + r * w.mask_row;
      if (w.mask_first)
        transpose_into<true>(dS + r, n, m, to, w.mask_row);
      else
        transpose_into<false>(dS + r, n, m, to, w.mask_row);
    }
  }
  static ATTN_NOINLINE double slope_gradient(const AttentionParams& p, const QueryRows& t, const C* dS, int64_t k0,
                                             const TileKeys& seen) {
    Vec<C> total = Vec<C>::zero();
    for (int64_t k = seen.begin; k < seen.end; k++) {
      const Vec<C> shift = Vec<C>::set(C(t.first + p.keys.offset - k0 - k));
      Vec<C> of_key = Vec<C>::zero();  // a sum of sums: fewer roundings of a large one
      for (int64_t i = 0; i < t.vectors_used; i++) {
        const Vec<C> d = Vec<C>::iota() + Vec<C>::set(C(i * W)) + shift;
        of_key = fma(load(dS + k * tile + i * W), max(d, Vec<C>::zero() - d), of_key);
      }
      total = total + of_key;
    }
    return -double(sum(total));
  }
};

}  // namespace
}  // namespace attnjourney
