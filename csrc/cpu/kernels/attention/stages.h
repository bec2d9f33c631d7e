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
#include "cpu/kernels/common/score_modifier.h"
#include "cpu/kernels/common/scratch.h"
#include "cpu/kernels/common/tile.h"
#include "key_walk.h"

namespace attnjourney {
namespace {

template <class Real>
struct TileStages {
  static constexpr int width = Vec<Real>::width;
  static constexpr int rows = Tuning::rows, vectors = Tuning::vectors;
  static constexpr int64_t panel = vectors * width;
  static constexpr int64_t tile = Tuning::backward_panels * panel;  // queries
  static constexpr int64_t key_block = Tuning::backward_keys;
  static constexpr int64_t line =
      64 / int64_t(sizeof(Real));  // one cache line between rows: no collisions at powers of two

  static int64_t key_ld(const AttentionParams& params) { return round_up(params.head_dim, line) + line; }
  static int64_t value_ld(const AttentionParams& params) { return round_up(params.v_head_dim, line) + line; }
  // queries and keys at a time: fewer where a mask of blocks has its borders
  static int64_t query_step(const AttentionParams& params) {
    return params.block_size ? block_step(params.block_size, tile) : tile;
  }
  static int64_t key_step(const AttentionParams& params) {
    return params.block_size ? block_step(params.block_size, key_block) : key_block;
  }
  static int64_t tiles_per_head(const AttentionParams& params) {
    return (params.q_len + query_step(params) - 1) / query_step(params);
  }

  // What every kernel knows of its query tile.
  struct QueryRows {
    Real* query_t;                  // panels [dim][panel]: query_factor * Q
    Real *shift, *inverse, *least;  // [tile]: weights are inverse * 2^(score + shift), no exponent below least
    const HeadPointers* head;
    int64_t first, count;  // rows
    int64_t vectors_used;
    RowPrefetch* prefetch;  // a step with each group of keys, or null
  };

  static void begin(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t count,
                    QueryRows& queries) {
    queries.head = &head;
    queries.first = first;
    queries.count = count;
    queries.vectors_used = (count + width - 1) / width;
    queries.prefetch = nullptr;
    const ScoreUnit unit = score_unit(params);
    for (int64_t r = 0; r < tile; r++) {
      const RowStats<Real> stats = r < count ? row_stats<Real>(head, first + r, unit) : RowStats<Real>{0, 0};
      queries.shift[r] = -stats.reference;
      queries.inverse[r] = stats.inverse;
      queries.least[r] = least_exponent(stats.inverse);
    }
  }
  static void take_rows(Scratch& scratch, QueryRows& queries) {
    queries.shift = scratch.take<Real>(tile);
    queries.inverse = scratch.take<Real>(tile);
    queries.least = scratch.take<Real>(tile);
  }
  // whether a row has one key with all its weight, against which the others count nothing
  static bool some_of_one_key(const QueryRows& queries) {
    bool found = false;
    for (int64_t r = 0; r < queries.count; r++)
      found |= queries.inverse[r] > Real(0.999) && queries.inverse[r] <= Real(1);
    return found;
  }
  // the weight of the sink of row r of the tile
  static double sink_weight_of(const AttentionParams& params, const QueryRows& queries, int64_t r) {
    return sink_weight<Real>(queries.head->sink, {-queries.shift[r], queries.inverse[r]}, score_unit(params));
  }
  template <class T>
  static bool pack_panels(const void* X, int64_t ld, const QueryRows& queries, int64_t dim, Real factor, Real* Y) {
    return pack_transposed_by(static_cast<const T*>(X) + queries.first * ld, ld, queries.count, dim,
                              TimesFinite<Real>{{factor}}, Y, panel, panel * dim, panel)
        .seen.all();
  }

  // query tiles whose buffers stay in the second-level cache together: a chunk
  template <class QueryTile, class Take>
  static int64_t chunk_tiles(const AttentionParams& params, const Take& take) {
    Scratch counting(nullptr);
    QueryTile unused;
    take(params, counting, unused);
    const int64_t fit = Tuning::backward_chunk_bytes / counting.used();
    return max_of(1, min_of(fit, params.group * tiles_per_head(params)));
  }

  // sum over n numbers of x y
  template <class X, class Y>
  static Real dot(const X* x, const Y* y, int64_t n) {
    Vec<Real> s = Vec<Real>::zero();
    int64_t d = 0;
    for (; d + width <= n; d += width) s = fma(load(x + d), load(y + d), s);
    Real total = sum(s);
    for (; d < n; d++) total += Real(load_one(x + d)) * Real(load_one(y + d));
    return total;
  }

  // sums[row] = the product of a row of X and one of Y, both in panels [dim][panel]: in the order of the products with
  // lanes over queries, so that a row whose weight is 1 for one key has a delta that is its dP to the last bit
  static ATTN_NOINLINE void products_of_rows(const QueryRows& queries, const Real* X, const Real* Y, int64_t dim,
                                             Real* sums, bool add = false) {
    for (int64_t v = 0; v < queries.vectors_used; v += vectors, X += panel * dim, Y += panel * dim)
      with_rows<vectors>(min_of(vectors, queries.vectors_used - v), [&](auto n) {
        Vec<Real> sum[n.count];
        ATTN_UNROLL for (int j = 0; j < n.count; j++) sum[j] =
            add ? load(sums + v * width + j * width) : Vec<Real>::zero();
        for (int64_t d = 0; d < dim; d++)
          ATTN_UNROLL for (int j = 0; j < n.count; j++) sum[j] =
              fma(load(X + d * panel + j * width), load(Y + d * panel + j * width), sum[j]);
        ATTN_UNROLL for (int j = 0; j < n.count; j++) store(sums + v * width + j * width, sum[j]);
      });
  }

  // Rows of out, or of its tangent, as panels for that: dropout's factor is in the panels of dO.
  template <class T>
  static void pack_out(const AttentionParams& params, const void* out, int64_t ld, const QueryRows& queries, Real* Y) {
    const double keep = params.dropout.keep_scale;
    pack_panels<T>(out, ld, queries, params.v_head_dim, Real(keep > 0 ? 1 / keep : 0), Y);
  }

  // ---- products with lanes over queries, each finished by a step on the accumulators

  // The sum of up to Terms products X[key][ld] times panels Y [dim][panel]; a term without X counts nothing.
  template <int Terms>
  struct Product {
    const Real *X[Terms], *Y[Terms];
    int64_t ld, dim;
  };

  // `rows` keys against a panel
  template <Hidden H, int Terms, class Step>
  static ATTN_INLINE void product(const Product<Terms>& terms, const Step& step, int64_t panel_index, int64_t key,
                                  int64_t k) {
    Tile<Real, rows, vectors> sums;
    sums.clear();
    ATTN_UNROLL for (int i = 0; i < Terms; i++) if (Terms == 1 || terms.X[i]) sums.add_rows(
        terms.X[i] + k * terms.ld, terms.ld, terms.Y[i] + panel_index * panel * terms.dim, panel, terms.dim);
    step.template finish<H>(sums, panel_index * panel, key, k);
  }
  // fewer than `rows` keys, or vectors of a panel: m keys against n vectors, from vector v on
  template <Hidden H, int Terms, class Step>
  static ATTN_NOINLINE void part_of_panel(const Product<Terms>& terms, const Step& step, int64_t panel_index, int64_t v,
                                          int64_t n, int64_t m, int64_t key, int64_t k) {
    RowSums<Real, rows, vectors> products;
    const Real* X[Terms];
    for (int i = 0; i < Terms; i++) X[i] = terms.X[i] ? terms.X[i] + k * terms.ld : nullptr;
    products.multiply(m, n, Terms, X, terms.ld, terms.Y, panel_index * panel * terms.dim + v * width, panel, terms.dim);
    products.each_row(m, n, [&](int64_t r, auto& row) {
      step.template finish<H>(row, panel_index * panel + v * width, key + r, k + r);
    });
  }
  // m keys against the panels from panel_index on, up to vector `end` of the tile
  template <Hidden H, int Terms, class Step>
  static ATTN_NOINLINE void against_panels(const Product<Terms>& terms, const Step& step, int64_t panel_index,
                                           int64_t end, int64_t m, int64_t key, int64_t k) {
    if (m == rows)
      for (; (panel_index + 1) * vectors <= end; panel_index++) product<H>(terms, step, panel_index, key, k);
    for (; panel_index * vectors < end; panel_index++)
      part_of_panel<H>(terms, step, panel_index, 0, min_of(vectors, end - panel_index * vectors), m, key, k);
  }
  // m keys against n vectors of one panel, from vector v on
  template <Hidden H, int Terms, class Step>
  static ATTN_INLINE void against_panel(const Product<Terms>& terms, const Step& step, int64_t panel_index, int64_t v,
                                        int64_t n, int64_t m, int64_t key, int64_t k) {
    if (m == rows && n == vectors)
      against_panels<H>(terms, step, panel_index, (panel_index + 1) * vectors, m, key, k);
    else
      part_of_panel<H>(terms, step, panel_index, v, n, m, key, k);
  }

  // One product for keys [begin, end) of the block, none of which the ranges hide
  template <Hidden H, int Terms, class Step>
  static ATTN_INLINE void inner(const Product<Terms>& terms, const QueryRows& queries, const Step& step, int64_t k0,
                                int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k += rows) {
      against_panels<H>(terms, step, 0, queries.vectors_used, min_of(rows, end - k), k0 + k, k);
      if (queries.prefetch) queries.prefetch->step();
    }
  }

  // Keys [begin, end) of the block, seen by some rows only: f(key, keys, panel, first vector, vectors) for the vectors
  // of rows that see any of a group of keys, clear(offset) for the others.
  template <class Clear, class F>
  static ATTN_INLINE void border(const AttentionParams& params, const QueryRows& queries, int64_t k0, int64_t begin,
                                 int64_t end, const Clear& clear, const F& f) {
    for (int64_t k = begin; k < end; k += rows) {
      const int64_t m = min_of(rows, end - k);
      for (int64_t q = 0; q * vectors < queries.vectors_used; q++) {
        const SeenLanes lanes = seen_lanes<width>(params.keys, queries.first + q * panel,
                                                  min_of(panel, queries.count - q * panel), k0 + k, m);
        for (int64_t r = 0; r < m; r++) {
          const int64_t at = (k + r) * tile + q * panel;
          for (int64_t j = 0; j < lanes.begin; j++) clear(at + width * j);
          for (int64_t j = lanes.end; j < vectors; j++) clear(at + width * j);
        }
        if (lanes.begin < lanes.end) f(k, m, q, lanes.begin, lanes.end - lanes.begin);
      }
    }
  }
  // One product there
  template <int Terms, class Step>
  static ATTN_NOINLINE void border_product(const AttentionParams& params, const Product<Terms>& terms,
                                           const QueryRows& queries, const Step& step, bool bias, int64_t k0,
                                           int64_t begin, int64_t end) {
    border(
        params, queries, k0, begin, end, [&](int64_t at) { step.clear(at); },
        [&](int64_t k, int64_t m, int64_t q, int64_t v, int64_t n) {
          if constexpr (!Step::hides)
            against_panel<Hidden::no>(terms, step, q, v, n, m, k0 + k, k);
          else if (bias)
            against_panel<Hidden::by_bias>(terms, step, q, v, n, m, k0 + k, k);
          else
            against_panel<Hidden::by_range>(terms, step, q, v, n, m, k0 + k, k);
        });
  }
  // One product for all keys of `seen`, the two borders finished by `careful`. In the order of the keys: what a step
  // sums over them does not depend on where the borders lie.
  template <int Terms, class Careful, class Step>
  static void seen_product(const AttentionParams& params, const Product<Terms>& terms, const QueryRows& queries,
                           const Careful& careful, const Step& step, bool bias, int64_t k0, const TileKeys& seen) {
    border_product(params, terms, queries, careful, bias, k0, seen.begin, seen.all_begin);
    const bool biased = Step::hides && bias;
    if constexpr (Step::hides)
      if (biased) inner<Hidden::by_bias>(terms, queries, step, k0, seen.all_begin, seen.all_end);
    if (!biased) inner<Hidden::no>(terms, queries, step, k0, seen.all_begin, seen.all_end);
    border_product(params, terms, queries, careful, bias, k0, seen.all_end, seen.end);
  }

  // P of a tile of M keys and N vectors of queries: the scores are the numbers that the forward had
  struct ScoreStep {
    static constexpr bool hides = true;
    const AttentionParams* params;
    const QueryRows* queries;
    Real* P;
    Real* states;  // [key][tile]: of the score modifier; or null
    ATTN_INLINE void clear(int64_t at) const { store(P + at, Vec<Real>::zero()); }
    template <int M, int N>
    ATTN_INLINE void modify(Real* x, int64_t at) const {
      const Modifier<Real> modifier(*params);
      if (!states) return modify_scores(x, M * N, modifier);
      alignas(64) Real own[M * N * width];
      modify_scores(x, M * N, modifier, own);
      ATTN_UNROLL for (int r = 0; r < M; r++) ATTN_UNROLL for (int j = 0; j < N; j++)
          store(states + at + r * tile + width * j, load(own + (r * N + j) * width));
    }
    template <Hidden H, int M, int N>
    ATTN_INLINE void finish(Tile<Real, M, N>& scores, int64_t lane0, int64_t key, int64_t k) const {
      Real* out = P + k * tile + lane0;
      if (params->modifier.on()) [[unlikely]]
        scores.through([&](Real* x) { modify<M, N>(x, k * tile + lane0); });
      LaneRange<Real> range[M];
      if constexpr (H == Hidden::by_range)
        ATTN_UNROLL for (int r = 0; r < M; r++) range[r] =
            lane_range<Real>(params->keys, queries->first + lane0, key + r);
      const Vec<Real> hidden = Vec<Real>::set(-Real(__builtin_inff()));
      const Vec<Real> exponents = Vec<Real>::set(Real(score_unit(*params).exponents));
      ATTN_UNROLL for (int j = 0; j < N; j++) {
        const Vec<Real> shift = load(queries->shift + lane0 + width * j),
                        inverse = load(queries->inverse + lane0 + width * j),
                        least = load(queries->least + lane0 + width * j);
        const Vec<Real> lane = Vec<Real>::iota() + Vec<Real>::set(Real(width * j));
        ATTN_UNROLL for (int r = 0; r < M; r++) {
          Vec<Real> weight;
          if constexpr (H == Hidden::by_bias) {
            const Vec<Real> bias = load(out + r * tile + width * j);
            const Vec<Real> exponent = ((scores.acc[r][j] + bias) + shift) * exponents;
            weight = select(eq(bias, hidden), Vec<Real>::zero(), exp2(exponent, least) * inverse);
          } else {
            weight = exp2(scores.acc[r][j] + shift, least) * inverse;
            if constexpr (H == Hidden::by_range) weight = select(range[r].visible(lane), weight, Vec<Real>::zero());
          }
          store(out + r * tile + width * j, weight);
        }
      }
    }
  };

  // The weights P of all keys of a block that the tile sees (K: [key][key_ld]), and which those are
  struct TileWeights {
    TileKeys seen;  // empty: nothing to do
    bool bias;      // P came from an additive block, which may hide keys anywhere
    bool some_hidden() const { return bias || seen.all_begin > seen.begin || seen.all_end < seen.end; }
  };
  // `product(step, bias, seen)`: S^T = K Q^T, finished by the step
  template <class T, class F>
  static ATTN_INLINE TileWeights recompute_weights_by(const AttentionParams& params, const QueryRows& queries,
                                                      int64_t k0, int64_t block, Real* P, Real* states,
                                                      const F& product) {
    constexpr TileKeys none{0, 0, 0, 0};
    const TileKeys seen = seen_keys(params, *queries.head, queries.first, queries.first + queries.count - 1, k0, block);
    if (seen.empty()) return {none, false};
    MaskBlock masked = MaskBlock::all_visible;
    if (params.mask != MaskKind::none || params.alibi)
      masked = load_bias<T>(params, *queries.head, queries.first, queries.count, k0, seen, P, tile);
    if (masked == MaskBlock::all_hidden) return {none, false};
    const bool bias = has_block(masked);
    product(ScoreStep{&params, &queries, P, states}, bias, seen);
    return {seen, bias};
  }
  template <class T>
  static TileWeights recompute_weights(const AttentionParams& params, const QueryRows& queries, const Real* K,
                                       int64_t k0, int64_t block, Real* P, Real* states) {
    return recompute_weights_by<T>(
        params, queries, k0, block, P, states, [&](const ScoreStep& score, bool bias, const TileKeys& seen) {
          seen_product(params, Product<1>{{K}, {queries.query_t}, key_ld(params), params.head_dim}, queries, score,
                       score, bias, k0, seen);
        });
  }
  // Dropout on them; see drop_tile
  static void drop(const AttentionParams& params, const QueryRows& queries, int64_t k0, const TileKeys& seen, bool mark,
                   Real* P) {
    const auto drop_border = [&](int64_t begin, int64_t end) {
      border(
          params, queries, k0, begin, end, [](int64_t) {},
          [&](int64_t k, int64_t m, int64_t q, int64_t v, int64_t n) {
            const int64_t lane = q * panel + v * width;
            drop_tile(params.dropout, queries.head->index, queries.first + lane,
                      min_of(queries.count - lane, n * width), k0, k, k + m, mark, P + lane, tile);
          });
    };
    drop_border(seen.begin, seen.all_begin);
    drop_border(seen.all_end, seen.end);
    if (seen.all_begin < seen.all_end)
      drop_tile(params.dropout, queries.head->index, queries.first, queries.count, k0, seen.all_begin, seen.all_end,
                mark, P, tile);
  }

  // ---- sums with lanes over head_dim

  template <int M, int N>
  static ATTN_NOINLINE void add_over_queries(const Real* left, const Real* right, int64_t right_ld, int64_t n,
                                             int64_t columns, Real* out, int64_t out_ld) {
    split_columns<Real, N>(columns, [&](int64_t d, auto n_) {
      Tile<Real, M, n_.count> sums;
      sums.clear();
      sums.add_rows(left, tile, right + d, right_ld, n);
      sums.add(out + d, out_ld);
      sums.store_to(out + d, out_ld);
    });
  }
  // out[k][round_up(dim, line)] += sum over the tile's queries of left[k][q] right[q]
  static void sum_queries(const AttentionParams& params, const QueryRows& queries, const Real* left, const Real* right,
                          int64_t right_ld, bool guarded, int64_t k0, const TileKeys& seen, int64_t dim, Real* out) {
    const int64_t out_ld = round_up(dim, line);
    if (guarded) {
      add_guarded(left + seen.begin * tile, 1, tile, seen.end - seen.begin, right, right_ld, queries.count, dim,
                  out + seen.begin * out_ld, out_ld);
      return;
    }
    const int64_t columns = round_up(dim, width);
    with_sum_tiles<Real>(columns, [&](auto shape) {
      split_rows<shape.rows>(seen.end - seen.begin, [&](int64_t k_, auto m) {
        const int64_t k = seen.begin + k_;
        const KeyRange r = params.keys.rows(k0 + k, k0 + k + m.count - 1, params.q_len);
        const int64_t from = max_of(0, r.begin - queries.first), to = min_of(queries.count, r.end - queries.first);
        if (queries.prefetch) queries.prefetch->step();
        if (from < to)
          add_over_queries<m.count, shape.vectors>(left + k * tile + from, right + from * right_ld, right_ld, to - from,
                                                   columns, out + k * out_ld, out_ld);
      });
    });
  }
  template <int M, int N>
  static ATTN_NOINLINE void add_over_keys(const Real* left, const Real* right, int64_t right_ld, int64_t n,
                                          int64_t columns, Real* out, int64_t out_ld) {
    split_columns<Real, N>(columns, [&](int64_t d, auto n_) {
      Tile<Real, M, n_.count> sums;
      sums.clear();
      sums.add_columns(left, tile, right + d, right_ld, n);
      sums.add(out + d, out_ld);
      sums.store_to(out + d, out_ld);
    });
  }
  // out[q][ld] += sum over the keys seen of left[k][q] right[k][ld]
  static void sum_keys(const AttentionParams& params, const QueryRows& queries, const Real* left, const Real* right,
                       int64_t ld, int64_t dim, bool guarded, int64_t k0, const TileKeys& seen, int64_t block,
                       Real* out) {
    if (guarded) {
      add_guarded(left + seen.begin * tile, tile, 1, queries.count, right + seen.begin * ld, ld, seen.end - seen.begin,
                  dim, out, ld);
      return;
    }
    const int64_t columns = round_up(dim, width);
    with_sum_tiles<Real>(columns, [&](auto shape) {
      split_rows<shape.rows>(queries.count, [&](int64_t r, auto m) {
        const TileKeys mine = tile_keys(params.keys, queries.first + r, queries.first + r + m.count - 1, k0, block);
        const int64_t begin = max_of(mine.begin, seen.begin), n = min_of(mine.end, seen.end) - begin;
        if (n > 0)
          add_over_keys<m.count, shape.vectors>(left + begin * tile + r, right + begin * ld, ld, n, columns,
                                                out + r * ld, ld);
      });
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

  // what the gradients of a head ask for; `partial`: dQ, too, into a part of its sum
  static Wanted wanted(const HeadGradients& gradients, bool partial) {
    return {.query = partial || gradients.query,
            .key = gradients.key != nullptr,
            .value = gradients.value != nullptr,
            .mask = gradients.mask,
            .mask_row = gradients.mask_row,
            .mask_col = gradients.mask_col,
            .mask_first = gradients.mask_first,
            .mask_once = gradients.mask_once,
            .slope = gradients.slope};
  }

  // m <= width rows of n numbers from dS[key][tile]: written, or added to what is there
  template <bool Write, class To>
  static ATTN_INLINE void transpose_into(const Real* dS, int64_t n, int64_t m, To* to, int64_t ld) {
    int64_t k = 0;
    for (; k + width <= n; k += width) {
      Vec<Real> t[width];
      ATTN_UNROLL for (int i = 0; i < width; i++) t[i] = load(dS + (k + i) * tile);
      transpose(t);
      for (int64_t i = 0; i < m; i++) store(to + i * ld + k, Write ? t[i] : load(to + i * ld + k) + t[i]);
    }
    for (; k < n; k++)
      for (int64_t i = 0; i < m; i++)
        store_one(to + i * ld + k, dS[k * tile + i] + (Write ? Real(0) : Real(load_one(to + i * ld + k))));
  }
  // Rows past the last one and hidden keys have dS 0. T: the dtype of query
  template <class T>
  static ATTN_NOINLINE void mask_gradient(const QueryRows& queries, const Wanted& wanted, const Real* dS, int64_t k0,
                                          const TileKeys& seen, Real* buffer) {
    const int64_t n = seen.end - seen.begin, at = queries.first * wanted.mask_row + (k0 + seen.begin) * wanted.mask_col;
    dS += seen.begin * tile;
    if (wanted.mask_once) {
      T* mask = static_cast<T*>(wanted.mask) + at;
      for (int64_t r = 0; r < queries.count; r += width)
        transpose_into<true>(dS + r, n, min_of(width, queries.count - r), mask + r * wanted.mask_row, wanted.mask_row);
      return;
    }
    Real* mask = static_cast<Real*>(wanted.mask) + at;
    if (wanted.mask_row == 0) {  // one value for all rows
      for (int64_t k = 0; k < n; k++) {
        Vec<Real> s = Vec<Real>::zero();
        for (int64_t i = 0; i < queries.vectors_used; i++) s = s + load(dS + k * tile + i * width);
        mask[k * wanted.mask_col] += sum(s);
      }
      return;
    }
    for (int64_t r = 0; r < queries.count; r += width) {
      const int64_t m = min_of(width, queries.count - r);
      if (wanted.mask_col == 0) {  // one value for all keys
        Vec<Real> s = Vec<Real>::zero();
        for (int64_t k = 0; k < n; k++) s = s + load(dS + k * tile + r);
        store(buffer, s);
        for (int64_t i = 0; i < m; i++) mask[(r + i) * wanted.mask_row] += buffer[i];
        continue;
      }
      Real* to = mask + r * wanted.mask_row;
      if (wanted.mask_first)
        transpose_into<true>(dS + r, n, m, to, wanted.mask_row);
      else
        transpose_into<false>(dS + r, n, m, to, wanted.mask_row);
    }
  }
  static ATTN_NOINLINE double slope_gradient(const AttentionParams& params, const QueryRows& queries, const Real* dS,
                                             int64_t k0, const TileKeys& seen) {
    Vec<Real> total = Vec<Real>::zero();
    for (int64_t k = seen.begin; k < seen.end; k++) {
      const Vec<Real> shift = Vec<Real>::set(Real(queries.first + params.keys.offset - k0 - k));
      Vec<Real> of_key = Vec<Real>::zero();  // a sum of sums: fewer roundings of a large one
      for (int64_t i = 0; i < queries.vectors_used; i++) {
        const Vec<Real> d = Vec<Real>::iota() + Vec<Real>::set(Real(i * width)) + shift;
        of_key = fma(load(dS + k * tile + i * width), max(d, Vec<Real>::zero() - d), of_key);
      }
      total = total + of_key;
    }
    return -double(sum(total));
  }
};

}  // namespace
}  // namespace attnjourney
