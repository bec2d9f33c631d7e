// The forward's products as they are written, in the precision of the arithmetic.
//
// S^T = K Q^T with lanes over queries: K is broadcast in place, Q^T lies packed in panels with scale and unit folded
// in, so maximum, exponential and sum are vertical. O = P V with lanes over v_head_dim; the last block normalises and
// stores. Row groups of P stop where their keys end.
#pragma once
#include "cpu/kernels/common/dropout_tile.h"
#include "cpu/kernels/common/exp2.h"
#include "cpu/kernels/common/pack.h"
#include "cpu/kernels/common/score_modifier.h"
#include "cpu/kernels/common/scratch.h"
#include "forward_tile.h"
#include "paged_rows.h"

namespace attnjourney {
namespace {

// A query tile against one key block, with the softmax epilogue on the accumulators of each register tile.
template <class Real>
struct ScoreTile {
  static constexpr int width = Vec<Real>::width;
  static constexpr int rows = Tuning::rows, vectors = Tuning::vectors;  // of a register tile
  static constexpr int64_t panel = vectors * width;                     // queries
  static constexpr int64_t tile = Tuning::forward_panels * panel;       // queries

  const Real* query;      // panels [head_dim][panel]
  const Real* reference;  // [tile], negated
  Real* weights;          // [key][tile]
  Vec<Real>*top, *total;  // [tile / width]: the largest score so far, the sum of the block
  int64_t head_dim, vectors_used;
  const KeyRanges* keys;
  int64_t first_row;
  Modifier<Real> modifier;
  Vec<Real> exponents;  // of a score beside a mask, see common/units.h
  Alibi<Real> alibi;
  RowPrefetch* prefetch;  // of the mask

  // `rows` keys against a panel
  template <Hidden H>
  ATTN_INLINE void register_tile(const Real* K, int64_t key_ld, int64_t panel_index, int64_t key, int64_t k) const {
    Tile<Real, rows, vectors> scores;
    scores.clear();
    scores.add_rows(K, key_ld, query + panel_index * panel * head_dim, panel, head_dim);
    if (modifier.on()) [[unlikely]]
      scores.through([&](Real* x) { modify_scores(x, rows * vectors, modifier); });
    softmax<H>(scores, panel_index * panel, key, k);
  }

  template <Hidden H, int M, int N>
  ATTN_INLINE void softmax(const Tile<Real, M, N>& scores, int64_t lane0, int64_t key, int64_t k) const {
    Real* const P = weights + k * tile + lane0;
    LaneRange<Real> range[M];
    if constexpr (H == Hidden::by_range)
      ATTN_UNROLL for (int r = 0; r < M; r++) range[r] = lane_range<Real>(*keys, first_row + lane0, key + r);
    const Vec<Real> hidden = Vec<Real>::set(-Real(__builtin_inff()));
    ATTN_UNROLL for (int j = 0; j < N; j++) {
      Vec<Real> row_max = top[lane0 / width + j], row_sum = total[lane0 / width + j];
      const Vec<Real> shift = load(reference + lane0 + width * j);
      const Vec<Real> lane = Vec<Real>::iota() + Vec<Real>::set(Real(width * j));
      Vec<Real> distance = alibi.distance(lane, lane0, k);
      ATTN_UNROLL for (int r = 0; r < M; r++, distance = distance - Vec<Real>::set(Real(1))) {
        Vec<Real> score = scores.acc[r][j],
                  weight;  // after the product: sums from the bias on would be rounded at its size
        if constexpr (H == Hidden::by_bias) {
          const Vec<Real> bias = load(P + r * tile + width * j);
          const auto gone = eq(bias, hidden);
          score = select(gone, hidden, score + bias);
          weight = select(gone, Vec<Real>::zero(), exp2((score + shift) * exponents));
        } else if constexpr (H == Hidden::by_range) {
          const auto visible = range[r].visible(lane);
          if (alibi.on) score = alibi.add(score, distance);
          score = select(visible, score, hidden);
          weight = select(visible, exp2(score + shift, least_of_rising<Real>), Vec<Real>::zero());
        } else if constexpr (H == Hidden::by_sum) {
          score = score + load(P + r * tile + width * j);
          weight = exp2((score + shift) * exponents);
        } else if constexpr (H == Hidden::by_alibi) {
          score = alibi.add(score, distance);
          weight = exp2(score + shift, least_of_rising<Real>);
        } else {
          weight = exp2(score + shift);
        }
        row_max = max(row_max, score);
        row_sum = row_sum + weight;
        store(P + r * tile + width * j, weight);
      }
      top[lane0 / width + j] = row_max;
      total[lane0 / width + j] = row_sum;
    }
  }

  // fewer than `rows` keys, or vectors of a panel: m keys against n vectors, from vector v on
  template <Hidden H>
  ATTN_NOINLINE void part_of_panel(const Real* K, int64_t key_ld, int64_t panel_index, int64_t v, int64_t n, int64_t m,
                                   int64_t key, int64_t k) const {
    RowSums<Real, rows, vectors> products;
    products.multiply(m, n, 1, &K, key_ld, &query, panel_index * panel * head_dim + v * width, panel, head_dim);
    if (modifier.on()) [[unlikely]]
      modify_scores(products.sums, int(m * vectors), modifier);
    products.each_row(
        m, n, [&](int64_t r, const auto& row) { softmax<H>(row, panel_index * panel + v * width, key + r, k + r); });
  }

  // m keys against the panels from panel_index on, up to vector `end` of the tile
  template <Hidden H>
  ATTN_NOINLINE void against_panels(const Real* K, int64_t key_ld, int64_t panel_index, int64_t end, int64_t m,
                                    int64_t key, int64_t k) const {
    if (m == rows)
      for (; (panel_index + 1) * vectors <= end; panel_index++) register_tile<H>(K, key_ld, panel_index, key, k);
    for (; panel_index * vectors < end; panel_index++)
      part_of_panel<H>(K, key_ld, panel_index, 0, min_of(vectors, end - panel_index * vectors), m, key, k);
  }
  // m keys against n vectors of one panel, from vector v on
  template <Hidden H>
  ATTN_INLINE void against_panel(const Real* K, int64_t key_ld, int64_t panel_index, int64_t v, int64_t n, int64_t m,
                                 int64_t key, int64_t k) const {
    if (m == rows && n == vectors)
      against_panels<H>(K, key_ld, panel_index, (panel_index + 1) * vectors, m, key, k);
    else
      part_of_panel<H>(K, key_ld, panel_index, v, n, m, key, k);
  }

  // keys [begin, end) of the block, all of them seen by every row of the tile (or hidden by the bias block)
  template <Hidden H>
  ATTN_INLINE void inner(const Real* K, int64_t key_ld, int64_t k0, int64_t begin, int64_t end) const {
    for (int64_t k = begin; k < end; k += rows) {
      against_panels<H>(K + k * key_ld, key_ld, 0, vectors_used, min_of(rows, end - k), k0 + k, k);
      if constexpr (H == Hidden::by_bias || H == Hidden::by_sum) prefetch->step();
    }
  }

  // keys [begin, end) of the block, seen by some rows only: vectors of rows that see none of a group are skipped
  ATTN_NOINLINE void border(const Real* K, int64_t key_ld, int64_t k0, int64_t begin, int64_t end, int64_t rows_used,
                            bool bias) const {
    for (int64_t k = begin; k < end; k += rows) {
      const int64_t m = min_of(rows, end - k);
      for (int64_t panel_index = 0; panel_index * vectors < vectors_used; panel_index++) {
        const int64_t lane0 = panel_index * panel;
        const SeenLanes lanes =
            seen_lanes<width>(*keys, first_row + lane0, min_of(rows_used - lane0, panel), k0 + k, m);
        for (int64_t r = 0; r < m; r++) {
          Real* const P = weights + (k + r) * tile + lane0;
          for (int64_t j = 0; j < lanes.begin; j++) store(P + width * j, Vec<Real>::zero());
          for (int64_t j = lanes.end; j < vectors; j++) store(P + width * j, Vec<Real>::zero());
        }
        if (lanes.begin >= lanes.end) continue;
        const Hidden hidden = bias           ? Hidden::by_bias
                              : !lanes.whole ? Hidden::by_range
                              : alibi.on     ? Hidden::by_alibi
                                             : Hidden::no;
        border_group(hidden, K + k * key_ld, key_ld, panel_index, lanes, m, k0 + k, k);
      }
    }
  }
  ATTN_INLINE void border_group(Hidden hidden, const Real* K, int64_t key_ld, int64_t panel_index,
                                const SeenLanes& lanes, int64_t m, int64_t key, int64_t k) const {
    const int64_t v = lanes.begin, n = lanes.end - lanes.begin;
    if (hidden == Hidden::by_bias)
      against_panel<Hidden::by_bias>(K, key_ld, panel_index, v, n, m, key, k);
    else if (hidden == Hidden::by_alibi)
      against_panel<Hidden::by_alibi>(K, key_ld, panel_index, v, n, m, key, k);
    else if (hidden == Hidden::no)
      against_panel<Hidden::no>(K, key_ld, panel_index, v, n, m, key, k);
    else
      against_panel<Hidden::by_range>(K, key_ld, panel_index, v, n, m, key, k);
  }
};

// Rows r .. of the tile: sums of the products of `keys` weights and values. One function for all dtypes of a precision.
template <class Real, int M, int N>
ATTN_NOINLINE void value_rows(const Real* weights, int64_t keys, const OutputTile<Real, Real>& output, int64_t value_ld,
                              const Real* values, int64_t r) {
  split_columns<Real, N>(output.columns, [&](int64_t d, auto n) {
    Tile<Real, M, n.count> sums;
    sums.clear();
    sums.add_columns(weights + r, ScoreTile<Real>::tile, values + d, value_ld, keys);
    output.put(sums, r, d);
  });
}

// T: of queries, keys and values
template <class T>
class PlainProducts : public SumsByRows {
  using Real = Compute<T>;
  static constexpr bool scaled = sizeof(T) == 1;  // rows have scales, which packing multiplies them by
  static constexpr int width = Vec<Real>::width;
  static constexpr int64_t panel = ScoreTile<Real>::panel;
  static constexpr bool same_dtype = sizeof(T) == sizeof(Real);

 public:
  using Out = Real;
  static constexpr int64_t tile = ScoreTile<Real>::tile;
  static constexpr bool rounds = false, narrow = false, own_scores = false, bias_is_overwritten = true;
  static constexpr Real weight_unit = 1;

  // Sums are added up after every block: less often of a long one, whose weights then leave the first-level cache.
  static ATTN_INLINE int64_t keys_at_once(const AttentionParams& params) {
    const int64_t numbers = params.head_dim + params.v_head_dim;
    const bool fits = Tuning::long_forward_keys * numbers * int64_t(sizeof(Real)) <= machine_tuning.long_block_bytes;
    return numbers >= 96 && fits ? Tuning::long_forward_keys : Tuning::forward_keys;
  }

  struct Buffers {
    int64_t key_ld, value_ld;
    Real* query;          // panels [head_dim][panel] of each tile
    Real* weights;        // [key_block][tile]
    Real *keys, *values;  // [key_block][ld], copies
    Buffers(const AttentionParams& params, int64_t tiles, Scratch& scratch)
        : key_ld(round_up(params.head_dim, 64 / int64_t(sizeof(Real)))),
          value_ld(sums_ld<Real>(params)),
          query(scratch.take<Real>(tiles * tile * params.head_dim)),
          weights(scratch.take<Real>(keys_at_once(params) * tile)),
          keys(scratch.take<Real>(keys_at_once(params) * key_ld)),
          values(scratch.take<Real>(keys_at_once(params) * value_ld)) {}
  };

  Real* const bias;  // where the weights will be

  PlainProducts(const AttentionParams& params, const HeadPointers& head, const Buffers& buffers, const CallRows&,
                const OtherRows&)
      : bias(buffers.weights), params_(params), head_(head), buffers_(buffers) {}

  static ATTN_INLINE bool writes_rows(const AttentionParams& params) {
    return same_dtype && params.v_head_dim % width == 0;
  }
  static ATTN_INLINE TileKeys whole_units(const TileKeys& seen) { return seen; }
  static ATTN_INLINE bool reaches_past(const TileKeys&) { return false; }

  ATTN_INLINE void pack_query(const QueryTile& rows) const {
    pack_transposed(static_cast<const T*>(head_.query) + rows.first * params_.q_row, params_.q_row, rows.count,
                    params_.head_dim, Times<Real>{query_factor<Real>(params_)}, query_of(rows), panel,
                    panel * params_.head_dim, panel);
    if constexpr (scaled) scale_query(rows);
  }

  ATTN_INLINE void load_block(int64_t k0, int64_t block, const PlacedRows<T>& keys, const PlacedRows<T>& values) {
    // dense rows are read in place; rows far apart collide in the cache, 16-bit ones are converted
    const auto dense = [](int64_t row) { return same_dtype && row * int64_t(sizeof(T)) < machine_tuning.apart_bytes; };
    k0_ = k0;
    block_ = block;
    keys_ = buffers_.keys;
    key_ld_ = buffers_.key_ld;
    values_ = buffers_.values;
    value_ld_ = buffers_.value_ld;
    values_finite_ = true;
    values_checked_ = false;
    if (dense(keys.ld)) {
      keys_ = reinterpret_cast<const Real*>(keys.first);
      key_ld_ = keys.ld;
    } else if (block) {
      pack(keys, head_.key_scale, params_.key_scale_block, params_.head_dim, buffers_.keys, key_ld_, params_.head_dim);
    }
    if (dense(values.ld) && params_.v_head_dim % width == 0) {
      values_ = reinterpret_cast<const Real*>(values.first);
      value_ld_ = values.ld;
    } else if (block) {
      values_finite_ = pack(values, head_.value_scale, params_.value_scale_block, params_.v_head_dim, buffers_.values,
                            value_ld_, round_up(params_.v_head_dim, width));
      values_checked_ = true;
    }
  }

  ATTN_INLINE void weights(const QueryTile& rows, const RunningRows<Real>& running, const TileKeys& seen,
                           MaskBlock masked, RowPrefetch& prefetch) {
    for (int64_t j = 0; j < rows.vectors_used; j++) {
      top_[j] = load_vector(running.top, j);
      total_[j] = Vec<Real>::zero();
    }
    const ScoreTile<Real> scores{.query = query_of(rows),
                                 .reference = running.reference,
                                 .weights = buffers_.weights,
                                 .top = top_,
                                 .total = total_,
                                 .head_dim = params_.head_dim,
                                 .vectors_used = rows.vectors_used,
                                 .keys = &params_.keys,
                                 .first_row = rows.first,
                                 .modifier = Modifier<Real>(params_),
                                 .exponents = Vec<Real>::set(Real(score_unit(params_).exponents)),
                                 .alibi = alibi_of<Real>(params_, head_, rows.first, k0_, masked),
                                 .prefetch = &prefetch};
    const bool bias = has_block(masked);
    scores.border(keys_, key_ld_, k0_, seen.begin, seen.all_begin, rows.count, bias);
    with_hidden(inside(masked), [&](auto hidden) {
      scores.template inner<hidden.value>(keys_, key_ld_, k0_, seen.all_begin, seen.all_end);
    });
    scores.border(keys_, key_ld_, k0_, seen.all_end, seen.end, rows.count, bias);
  }
  ATTN_INLINE Vec<Real> top(int64_t j) const { return top_[j]; }
  ATTN_INLINE void save_running(const QueryTile& rows, const RunningRows<Real>& running) const {
    for (int64_t j = 0; j < rows.vectors_used; j++) {
      store(running.top + j * width, top_[j]);
      store(running.total + j * width, load_vector(running.total, j) + total_[j]);
    }
  }

  ATTN_INLINE void drop(const QueryTile& rows, const TileKeys& seen) const {
    drop_tile(params_.dropout, head_.index, rows.first, rows.count, k0_, seen.begin, seen.end, false, buffers_.weights,
              tile);
  }
  // looked at where it matters first
  ATTN_INLINE bool values_finite() {
    if (!values_checked_) {
      values_checked_ = true;
      values_finite_ = all_finite(values_, value_ld_, block_, params_.v_head_dim);
    }
    return values_finite_;
  }
  ATTN_INLINE void add_values(const QueryTile& rows, const TileKeys& seen, const OutputTile<Real, Real>& output,
                              RowPrefetch& prefetch) const {
    with_sum_tiles<Real>(output.columns, [&](auto shape) {
      each_row_group<shape.rows>(params_.keys, rows, k0_, block_, seen, [&](int64_t r, auto m, const KeyRange& keys) {
        value_rows<Real, m.count, shape.vectors>(buffers_.weights + keys.begin * tile, max_of(0, keys.end - keys.begin),
                                                 output, value_ld_, values_ + keys.begin * value_ld_, r);
        prefetch.step();
      });
    });
  }
  // the same where a value is an inf or a NaN: a weight of exactly 0 hides it
  ATTN_INLINE void add_values_guarded(const QueryTile& rows, const TileKeys& seen,
                                      const OutputTile<Real, Real>& output) const {
    add_guarded(buffers_.weights + seen.begin * tile, tile, 1, rows.count, values_ + seen.begin * value_ld_, value_ld_,
                seen.end - seen.begin, params_.v_head_dim, output.sums, output.ld);
  }

 private:
  // the rows of the key block
  ATTN_INLINE bool pack(const PlacedRows<T>& rows, const float* scales, int64_t scale_block, int64_t cols, Real* to,
                        int64_t to_ld, int64_t padded) const {
    if constexpr (!scaled) {
      return pack_rows(rows.first, rows.ld, block_, cols, to, to_ld, padded);
    } else {
      bool finite = true;
      for (int64_t r = 0, n; r < block_; r += n) {
        const int64_t key = k0_ + r;
        n = min_of(block_ - r, fp8_scale_rows - key % fp8_scale_rows);
        const Times<Real> times{scales[key / fp8_scale_rows * scale_block]};
        finite &= pack_rows_by(rows.first + r * rows.ld, rows.ld, n, cols, times, to + r * to_ld, to_ld, padded);
      }
      return finite;
    }
  }
  ATTN_NOINLINE void scale_query(const QueryTile& rows) const {
    for (int64_t j = 0; j < rows.vectors_used; j++) {
      alignas(64) Real factors[width];
      for (int i = 0; i < width; i++) {
        const int64_t row = min_of(rows.first + j * width + i, params_.q_len - 1);
        factors[i] = head_.query_scale[row / fp8_scale_rows * params_.query_scale_block];
      }
      const Vec<Real> factor = load(factors);
      Real* const lanes = query_of(rows) + j * width / panel * panel * params_.head_dim + j * width % panel;
      for (int64_t d = 0; d < params_.head_dim; d++) store(lanes + d * panel, load(lanes + d * panel) * factor);
    }
  }

  Real* query_of(const QueryTile& rows) const { return buffers_.query + rows.index * tile * params_.head_dim; }
  static ATTN_INLINE Vec<Real> load_vector(const Real* x, int64_t j) { return load(x + j * width); }

  const AttentionParams& params_;
  const HeadPointers& head_;
  const Buffers& buffers_;
  Vec<Real> top_[tile / width], total_[tile / width];  // of a tile: largest scores, sums of the block
  // the key block
  int64_t k0_ = 0, block_ = 0, key_ld_ = 0, value_ld_ = 0;
  const Real *keys_ = nullptr, *values_ = nullptr;
  bool values_checked_ = false, values_finite_ = true;
};

}  // namespace
}  // namespace attnjourney
