// Attention backward (Dao et al. 2022, arXiv 2205.14135): P is recomputed from lse, O(len) memory.
//
// Queries go in chunks whose packed data stays in the second-level cache, key blocks inside, query tiles innermost.
// S^T = K Q^T and dP^T = V dO^T have lanes over queries, so exp2 and P * (dP - delta) are vertical; dV = P^T dO,
// dK = dS^T Q and dQ = dS K have lanes over head_dim.
#pragma once
#include "../../attention_params.h"
#include "dropout_tile.h"
#include "exp2.h"
#include "mask_tile.h"
#include "pack.h"
#include "softcap.h"
#include "tile.h"

namespace attnjourney {
namespace {

template <class C>
struct Backward {
  static constexpr int W = Vec<C>::width;
  static constexpr int rows = Tuning::rows, vectors = Tuning::vectors;
  static constexpr int64_t panel = vectors * W;
  static constexpr int64_t tile = Tuning::backward_panels * panel;
  static constexpr int64_t key_block = Tuning::backward_keys;
  static constexpr int64_t chunk_bytes = Tuning::backward_chunk_bytes;
  static constexpr int64_t line =
      64 / int64_t(sizeof(C));  // one cache line between rows: no collisions at powers of two

  static int64_t key_ld(const AttentionParams& p) { return round_up(p.head_dim, line) + line; }
  static int64_t value_ld(const AttentionParams& p) { return round_up(p.v_head_dim, line) + line; }
  static int64_t tiles_per_head(const AttentionParams& p) { return (p.q_len + tile - 1) / tile; }

  // numbers of one packed query tile: Q^T, dO^T, Q, dO, dQ, -lse, -delta
  static int64_t tile_numbers(const AttentionParams& p) {
    return tile * (round_up(p.head_dim, line) + round_up(p.v_head_dim, line) + 2 * key_ld(p) + value_ld(p) + 3);
  }
  static int64_t chunk_tiles(const AttentionParams& p) {
    const int64_t fit = chunk_bytes / (tile_numbers(p) * int64_t(sizeof(C)));
    return max_of(1, min_of(fit, p.group * tiles_per_head(p)));
  }

  // scratch, in numbers
  struct Space {
    int64_t chunk, P, dS, cap_slope, key, value, grad_key, grad_value, total;
    explicit Space(const AttentionParams& p) {
      chunk = 0;
      P = chunk + chunk_tiles(p) * tile_numbers(p);
      dS = P + key_block * tile;
      cap_slope = dS + key_block * tile;
      key = cap_slope + (p.softcap > 0 ? key_block * tile : 0);
      value = key + key_block * key_ld(p);
      grad_key = value + key_block * value_ld(p);
      grad_value = grad_key + p.kv_len * round_up(p.head_dim, line);
      total = grad_value + p.kv_len * round_up(p.v_head_dim, line);
    }
  };

  struct QueryTile {
    C *query_t, *grad_t;           // panels [dim][panel]; query_t holds query_factor * Q, grad_t dO / (1 - dropout_p)
    C *query, *grad;               // [tile][ld]
    C* grad_query;                 // [tile][ld], sum of dS K
    C *minus_lse, *minus_lse_low;  // [tile]; their sum is -lse in log2 units, beyond the precision of one number
    C* minus_delta;                // [tile]
    const HeadPointers* head;
    int64_t first, count;  // rows
    int64_t vectors_used;
    bool query_finite, grad_finite;
  };

  static QueryTile place(const AttentionParams& p, C* at) {
    QueryTile t;
    t.query_t = at;
    t.grad_t = t.query_t + tile * round_up(p.head_dim, line);
    t.query = t.grad_t + tile * round_up(p.v_head_dim, line);
    t.grad = t.query + tile * key_ld(p);
    t.grad_query = t.grad + tile * value_ld(p);
    t.minus_lse = t.grad_query + tile * key_ld(p);
    t.minus_lse_low = t.minus_lse + tile;
    t.minus_delta = t.minus_lse_low + tile;
    return t;
  }

  // -lse of row r in log2 units, as two numbers; 0 where no key is visible: the masks make P zero
  static double split_lse(C lse, QueryTile& t, int64_t r) {
    double l = lse != -C(__builtin_inff()) ? double(lse) * log2_e : 0;
    if (l < double(MaskValue<C>::lowest)) l = double(MaskValue<C>::lowest);
    t.minus_lse[r] = C(-l);
    t.minus_lse_low[r] = C(-l - double(C(-l)));
    return l;
  }

  template <class T>
  static ATTN_NOINLINE void prepare(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t count,
                                    QueryTile& t, double* grad_sink) {
    const int64_t D = p.head_dim, Dv = p.v_head_dim;
    const T* q = static_cast<const T*>(h.query) + first * p.q_row;
    const T* g = static_cast<const T*>(h.grad_out) + first * p.grad_out_row;
    const T* o = static_cast<const T*>(h.out) + first * p.out_row;
    const C* lse = static_cast<const C*>(h.lse) + first;
    t.head = &h;
    t.first = first;
    t.count = count;
    t.vectors_used = (count + W - 1) / W;
    pack_transposed(q, p.q_row, count, D, Times<C>{query_factor<C>(p)}, t.query_t, panel, panel * D, panel);
    pack_transposed(g, p.grad_out_row, count, Dv, Times<C>{C(p.dropout.keep_scale)}, t.grad_t, panel, panel * Dv,
                    panel);
    t.query_finite = pack_rows(q, p.q_row, count, D, t.query, key_ld(p), round_up(D, W));
    t.grad_finite = pack_rows(g, p.grad_out_row, count, Dv, t.grad, value_ld(p), round_up(Dv, W));
    for (int64_t r = 0; r < tile; r++) {
      C delta = 0;
      if (r < count) {
        Vec<C> s = Vec<C>::zero();
        int64_t d = 0;
        for (; d + W <= Dv; d += W) s = fma(load(o + r * p.out_row + d), load(t.grad + r * value_ld(p) + d), s);
        delta = sum(s);
        for (; d < Dv; d++) delta += C(load_one(o + r * p.out_row + d)) * t.grad[r * value_ld(p) + d];
        if (h.grad_lse) delta -= static_cast<const C*>(h.grad_lse)[first + r];
      }
      const double l = split_lse(r < count ? lse[r] : C(0), t, r);
      if (grad_sink && r < count && h.sink != -__builtin_inf())
        *grad_sink -= __builtin_exp2(h.sink * log2_e - l) * double(delta);
      t.minus_delta[r] = -delta;
    }
    memset(t.grad_query, 0, size_t(tile * key_ld(p)) * sizeof(C));
  }

  // Epilogues of a tile of M keys and N vectors of queries.
  struct ScoreStep {  // P = exp2(S - lse)
    const AttentionParams* params;
    const QueryTile* t;
    C* P;
    C* cap_slope;  // [key][tile]: with softcap, the derivative of a score by what was capped; or null
    template <int M, int N>
    ATTN_INLINE void capped(C* x, int64_t at) const {
      const C cap = C(params->softcap * log2_e);
      if (!cap_slope) return cap_scores(x, M * N, cap);
      alignas(64) C slope[M * N * W];
      cap_scores(x, M * N, cap, slope);
      ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
          store(cap_slope + at + r * tile + W * j, load(slope + (r * N + j) * W));
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
  template <bool Dropout, bool Guard>
  struct GradientStep {  // dS = P * (dP - delta)
    const QueryTile* t;
    C *P, *dS;
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

  // X[key][ldx] times Y (panels): M keys against N vectors of panel p, from vector v on
  template <Hidden H, int M, int N, class Step>
  static ATTN_INLINE void product(const C* X, int64_t ldx, const C* Y, int64_t dim, const Step& step, int64_t p,
                                  int64_t v, int64_t key, int64_t k) {
    Tile<C, M, N> t;
    t.clear();
    t.add_rows(X, ldx, Y + p * panel * dim + v * W, panel, dim);
    step.template finish<H>(t, p * panel + v * W, key, k);
  }
  // ... against all panels
  template <Hidden H, int M, class Step>
  static ATTN_NOINLINE void rows_times_panels(const C* X, int64_t ldx, const C* Y, int64_t dim, int64_t vectors_used,
                                              const Step& step, int64_t key, int64_t k) {
    int64_t p = 0;
    for (; (p + 1) * vectors <= vectors_used; p++) product<H, M, vectors>(X, ldx, Y, dim, step, p, 0, key, k);
    if constexpr (vectors > 1)
      if (p * vectors < vectors_used)
        with_rows<vectors - 1>(vectors_used - p * vectors,
                               [&](auto n) { product<H, M, n.count>(X, ldx, Y, dim, step, p, 0, key, k); });
  }
  // ... against n vectors of one panel
  template <Hidden H, int M, class Step>
  static ATTN_NOINLINE void rows_times_panel(const C* X, int64_t ldx, const C* Y, int64_t dim, const Step& step,
                                             int64_t p, int64_t v, int64_t n, int64_t key, int64_t k) {
    with_rows<vectors>(n, [&](auto n_) { product<H, M, n_.count>(X, ldx, Y, dim, step, p, v, key, k); });
  }

  // One product for keys [begin, end) of the block, none of which the ranges hide
  template <Hidden H, class Step>
  static ATTN_INLINE void inner(const C* X, int64_t ldx, const C* Y, int64_t dim, const QueryTile& t, const Step& step,
                                int64_t k0, int64_t begin, int64_t end) {
    split_rows<rows>(end - begin, [&](int64_t k, auto m) {
      rows_times_panels<H, m.count>(X + (begin + k) * ldx, ldx, Y, dim, t.vectors_used, step, k0 + begin + k,
                                    begin + k);
    });
  }
  struct Wanted {
    bool query, key, value;
    C* mask;  // [q_len][kv_len] of this head, or null
    int64_t mask_row, mask_col;
    double* slope;                                                 // of ALiBi, or null
    bool scores() const { return query || key || mask || slope; }  // dS is needed
  };

  // S and dS of keys [begin, end), seen by some rows only. Vectors of rows that see none of a group get zeros.
  template <class Score, class Gradient>
  static ATTN_NOINLINE void border(const AttentionParams& p, const C* K, const C* V, const QueryTile& t,
                                   const Score& score, const Gradient& gradient, const Wanted& w, bool bias, int64_t k0,
                                   int64_t begin, int64_t end) {
    const int64_t ldk = key_ld(p), ldv = value_ld(p);
    for (int64_t k = begin; k < end; k += rows) {
      const int64_t m = min_of(rows, end - k);
      const C *key = K + k * ldk, *value = V + k * ldv;
      for (int64_t q = 0; q * vectors < t.vectors_used; q++) {
        const int64_t first = t.first + q * panel, used = min_of(panel, t.count - q * panel);
        const SeenLanes lanes = seen_lanes<W>(p.keys, first, used, k0 + k, m);
        for (int64_t r = 0; r < m; r++) {
          const int64_t at = (k + r) * tile + q * panel;
          const auto clear = [&](int64_t j) {
            store(score.P + at + W * j, Vec<C>::zero());
            store(gradient.dS + at + W * j, Vec<C>::zero());
          };
          for (int64_t j = 0; j < lanes.begin; j++) clear(j);
          for (int64_t j = lanes.end; j < vectors; j++) clear(j);
        }
        if (lanes.begin >= lanes.end) continue;
        const int64_t v = lanes.begin, n = lanes.end - v;
        with_rows<rows>(m, [&](auto m_) {
          if (bias)
            rows_times_panel<Hidden::by_bias, m_.count>(key, ldk, t.query_t, p.head_dim, score, q, v, n, k0 + k, k);
          else
            rows_times_panel<Hidden::by_range, m_.count>(key, ldk, t.query_t, p.head_dim, score, q, v, n, k0 + k, k);
        });
        if (p.dropout.on())
          drop_tile(p.dropout, t.head->index, first + v * W, min_of(used - v * W, n * W), k0, k, k + m, w.scores(),
                    score.P + q * panel + v * W, tile);
        if (w.scores())
          with_rows<rows>(m, [&](auto m_) {
            rows_times_panel<Hidden::no, m_.count>(value, ldv, t.grad_t, p.v_head_dim, gradient, q, v, n, k0 + k, k);
          });
      }
    }
  }

  // sum[k] += A[k][q] B[q] over queries [from, to) of the tile
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
  static void key_gradient(const AttentionParams& p, const QueryTile& t, const C* A, const C* B, int64_t ldb,
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
  static void query_gradient(const AttentionParams& p, const QueryTile& t, const C* dS, const C* K, bool guarded,
                             int64_t k0, const TileKeys& seen, int64_t block) {
    const int64_t ld = key_ld(p);
    if (guarded) {
      add_guarded(dS + seen.begin * tile, tile, 1, t.count, K + seen.begin * ld, ld, seen.end - seen.begin, p.head_dim,
                  t.grad_query, ld);
      return;
    }
    split_rows<rows>(t.count, [&](int64_t r, auto m) {
      const TileKeys mine = tile_keys(p.keys, t.first + r, t.first + r + m.count - 1, k0, block);
      const int64_t begin = max_of(mine.begin, seen.begin), n = min_of(mine.end, seen.end) - begin;
      if (n > 0)
        add_over_keys<m.count>(dS + begin * tile + r, K + begin * ld, ld, n, round_up(p.head_dim, W),
                               t.grad_query + r * ld, ld);
    });
  }

  // Rows past the last one and hidden keys have dS 0.
  static ATTN_NOINLINE void mask_gradient(const QueryTile& t, const Wanted& w, const C* dS, int64_t k0,
                                          const TileKeys& seen, C* buffer) {
    const int64_t n = seen.end - seen.begin, ld = round_up(n, W);
    dS += seen.begin * tile;
    C* mask = w.mask + t.first * w.mask_row + (k0 + seen.begin) * w.mask_col;
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
      pack_transposed(dS + r, tile, n, m, Times<C>{C(1)}, buffer, W, W, ld);  // W rows at a time: [W][ld]
      for (int64_t i = 0; i < m; i++) {
        C* row = mask + (r + i) * w.mask_row;
        int64_t k = 0;
        for (; k + W <= n; k += W) store(row + k, load(row + k) + load(buffer + i * ld + k));
        for (; k < n; k++) row[k] += buffer[i * ld + k];
      }
    }
  }
  static ATTN_NOINLINE double slope_gradient(const AttentionParams& p, const QueryTile& t, const C* dS, int64_t k0,
                                             const TileKeys& seen) {
    Vec<C> total = Vec<C>::zero();
    for (int64_t k = seen.begin; k < seen.end; k++) {
      const Vec<C> shift = Vec<C>::set(C(t.first + p.keys.offset - k0 - k));
      for (int64_t i = 0; i < t.vectors_used; i++) {
        const Vec<C> d = Vec<C>::iota() + Vec<C>::set(C(i * W)) + shift;
        total = fma(load(dS + k * tile + i * W), max(d, Vec<C>::zero() - d), total);
      }
    }
    return -double(sum(total));
  }
  // dS by the capped scores -> dS by the scores; a hidden NaN stays hidden
  static ATTN_NOINLINE void through_softcap(const QueryTile& t, const C* cap_slope, const TileKeys& seen, C* dS) {
    const Vec<C> zero = Vec<C>::zero();
    for (int64_t k = seen.begin; k < seen.end; k++)
      for (int64_t i = 0; i < t.vectors_used; i++) {
        C* x = dS + k * tile + i * W;
        const Vec<C> s = load(x);
        store(x, select(eq(s, zero), zero, s * load(cap_slope + k * tile + i * W)));
      }
  }

  // One query tile against one key block.
  template <class T, bool DropoutOn>
  static void tile_step(const AttentionParams& p, const QueryTile& t, const Wanted& w, const C* K, const C* V,
                        bool key_finite, int64_t k0, int64_t block, C* P, C* dS, C* cap_slope, C* grad_key,
                        C* grad_value) {
    const TileKeys seen = tile_keys(p.keys, t.first, t.first + t.count - 1, k0, block);
    if (seen.empty()) return;
    MaskBlock masked = MaskBlock::all_visible;
    if (p.mask != MaskKind::none || p.alibi) masked = load_bias<T>(p, *t.head, t.first, t.count, k0, seen, P, tile);
    if (masked == MaskBlock::all_hidden) return;
    const bool bias = masked == MaskBlock::some_hidden || masked == MaskBlock::added;
    const ScoreStep score{&p, &t, P, w.scores() ? cap_slope : nullptr};
    const GradientStep<DropoutOn, true> careful{&t, P, dS};
    border(p, K, V, t, score, careful, w, bias, k0, seen.begin, seen.all_begin);
    border(p, K, V, t, score, careful, w, bias, k0, seen.all_end, seen.end);
    const int64_t a = seen.all_begin, z = seen.all_end;
    if (bias)
      inner<Hidden::by_bias>(K, key_ld(p), t.query_t, p.head_dim, t, score, k0, a, z);
    else
      inner<Hidden::no>(K, key_ld(p), t.query_t, p.head_dim, t, score, k0, a, z);
    if (DropoutOn && z > a) drop_tile(p.dropout, t.head->index, t.first, t.count, k0, a, z, w.scores(), P, tile);
    if (!w.scores()) {
    } else if (bias)
      inner<Hidden::no>(V, value_ld(p), t.grad_t, p.v_head_dim, t, careful, k0, a, z);
    else
      inner<Hidden::no>(V, value_ld(p), t.grad_t, p.v_head_dim, t, GradientStep<DropoutOn, false>{&t, P, dS}, k0, a, z);

    const bool some_hidden = bias || a > seen.begin || z < seen.end;
    if (w.value)
      key_gradient(p, t, P, t.grad, value_ld(p), some_hidden && !t.grad_finite, k0, seen, p.v_head_dim, grad_value);
    if (w.slope) *w.slope += slope_gradient(p, t, dS, k0, seen);
    if (w.mask) mask_gradient(t, w, dS, k0, seen, P);  // P has served
    if (p.softcap > 0 && (w.key || w.query)) through_softcap(t, cap_slope, seen, dS);
    if (w.key)
      key_gradient(p, t, dS, t.query, key_ld(p), some_hidden && !t.query_finite, k0, seen, p.head_dim, grad_key);
    if (w.query) query_gradient(p, t, dS, K, some_hidden && !key_finite, k0, seen, block);
  }

  // The share of key blocks `part` of `parts` of one key/value head: dealt in a snake, so that causal shares are even.
  static bool owns(int64_t block, int64_t part, int64_t parts) {
    const int64_t round = block / parts, seat = block % parts;
    return part == (round & 1 ? parts - 1 - seat : seat);
  }

  // heads: the group's query heads. With parts > 1, dQ is left unscaled in partial_query [group][q_len][ld]
  // (ld = round_up(head_dim, line)) for the ordered sum; else it goes to grad_query. The key blocks' dK and dV go to
  // grad_key and grad_value in either case.
  template <class T>
  static void run(const AttentionParams& p, const HeadPointers* heads, const HeadGradients* gradients, int64_t part,
                  int64_t parts, void* partial_query, void* space_) {
    C* space = static_cast<C*>(space_);
    const Space at(p);
    C *P = space + at.P, *dS = space + at.dS, *cap_slope = space + at.cap_slope, *Kb = space + at.key,
      *Vb = space + at.value;
    C *grad_key = space + at.grad_key, *grad_value = space + at.grad_value;
    const int64_t D = p.head_dim, Dv = p.v_head_dim, ldgk = round_up(D, line), ldgv = round_up(Dv, line);
    const int64_t per_head = tiles_per_head(p), all_tiles = p.group * per_head, chunk = chunk_tiles(p);
    const T* K = static_cast<const T*>(heads[0].key);
    const T* V = static_cast<const T*>(heads[0].value);
    const HeadGradients& g0 = gradients[0];
    memset(grad_key, 0, size_t(p.kv_len * (ldgk + ldgv)) * sizeof(C));

    for (int64_t c0 = 0; c0 < all_tiles; c0 += chunk) {
      const int64_t n_tiles = min_of(chunk, all_tiles - c0);
      const auto tile_at = [&](int64_t i) { return place(p, space + at.chunk + i * tile_numbers(p)); };
      QueryTile tiles_[Tuning::backward_max_tiles];
      for (int64_t i = 0; i < n_tiles; i++) {
        const int64_t head = (c0 + i) / per_head, first = (c0 + i) % per_head * tile;
        tiles_[i] = tile_at(i);
        prepare<T>(p, heads[head], first, min_of(tile, p.q_len - first), tiles_[i],
                   part == 0 ? gradients[head].sink : nullptr);
      }
      for (int64_t k0 = 0, block_index = 0; k0 < p.keys.key_length; k0 += key_block, block_index++) {
        if (!owns(block_index, part, parts)) continue;
        const int64_t block = min_of(key_block, p.keys.key_length - k0);
        bool used = false;
        for (int64_t i = 0; i < n_tiles && !used; i++)
          used = !tile_keys(p.keys, tiles_[i].first, tiles_[i].first + tiles_[i].count - 1, k0, block).empty();
        if (!used) continue;
        const bool key_finite = pack_rows(K + k0 * p.k_row, p.k_row, block, D, Kb, key_ld(p), round_up(D, W));
        pack_rows(V + k0 * p.v_row, p.v_row, block, Dv, Vb, value_ld(p), round_up(Dv, W));
        for (int64_t i = 0; i < n_tiles; i++) {
          const HeadGradients& g = gradients[(c0 + i) / per_head];
          const Wanted w{g.query != nullptr || partial_query != nullptr,
                         g0.key != nullptr,
                         g0.value != nullptr,
                         static_cast<C*>(g.mask),
                         g.mask_row,
                         g.mask_col,
                         g.slope};
          C *gk = grad_key + k0 * ldgk, *gv = grad_value + k0 * ldgv;
          if (p.dropout.on())
            tile_step<T, true>(p, tiles_[i], w, Kb, Vb, key_finite, k0, block, P, dS, cap_slope, gk, gv);
          else
            tile_step<T, false>(p, tiles_[i], w, Kb, Vb, key_finite, k0, block, P, dS, cap_slope, gk, gv);
        }
      }
      for (int64_t i = 0; i < n_tiles; i++) {
        const QueryTile& t = tiles_[i];
        const int64_t head = (c0 + i) / per_head;
        if (partial_query) {
          C* y = static_cast<C*>(partial_query) + (head * p.q_len + t.first) * ldgk;
          unpack_rows<C>(t.grad_query, key_ld(p), t.count, D, C(1), y, ldgk);
        } else if (gradients[head].query) {
          unpack_rows<T>(t.grad_query, key_ld(p), t.count, D, C(p.scale),
                         static_cast<T*>(gradients[head].query) + t.first * gradients[head].query_row,
                         gradients[head].query_row);
        }
      }
    }
    for (int64_t k0 = 0, block_index = 0; k0 < p.kv_len; k0 += key_block, block_index++) {
      if (!owns(block_index, part, parts)) continue;
      const int64_t n = min_of(key_block, p.kv_len - k0);
      if (g0.key)
        unpack_rows<T>(grad_key + k0 * ldgk, ldgk, n, D, C(p.scale), static_cast<T*>(g0.key) + k0 * g0.key_row,
                       g0.key_row);
      if (g0.value)
        unpack_rows<T>(grad_value + k0 * ldgv, ldgv, n, Dv, C(p.dropout.keep_scale),
                       static_cast<T*>(g0.value) + k0 * g0.value_row, g0.value_row);
    }
  }

  // dQ of rows [first, first + count) of one head: the ordered sum of the parts, scaled
  template <class T>
  static void sum_parts(const AttentionParams& p, const void* partial_, int64_t part_stride, int64_t parts,
                        int64_t first, int64_t count, const HeadGradients& g) {
    const C* partial = static_cast<const C*>(partial_);
    const int64_t ld = round_up(p.head_dim, line);
    for (int64_t r = first; r < first + count; r++) {
      T* y = static_cast<T*>(g.query) + r * g.query_row;
      const C* x = partial + r * ld;
      int64_t d = 0;
      for (; d + W <= p.head_dim; d += W) {
        Vec<C> s = load(x + d);
        for (int64_t i = 1; i < parts; i++) s = s + load(x + i * part_stride + d);
        store(y + d, s * Vec<C>::set(C(p.scale)));
      }
      for (; d < p.head_dim; d++) {
        C s = x[d];
        for (int64_t i = 1; i < parts; i++) s += x[i * part_stride + d];
        store_one(y + d, s * C(p.scale));
      }
    }
  }
};

}  // namespace
}  // namespace attnjourney
