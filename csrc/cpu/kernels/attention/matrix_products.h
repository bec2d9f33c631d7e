// The forward's products on a matrix unit, of parts (common/parts.h): one part for bfloat16, whose weights are rounded
// as they are to be multiplied, two for float16, three for float32. Where the unit multiplies float16 numbers one for
// those.
//
// S^T = K Q^T: [key][query], a group of 32 keys at a time by way of memory; O^T = V^T P, weights of keys i and i + 16
// of every 32 side by side. The sums of values stay transposed, in tiles, until the last key.
#pragma once
#include "cpu/kernels/common/dropout_tile.h"
#include "cpu/kernels/common/parts.h"
#include "cpu/kernels/common/scratch.h"
#include "forward_softmax.h"
#include "forward_tile.h"
#include "paged_rows.h"
#include "visible.h"

namespace attnjourney {
namespace {

template <class T, class Unit>
class MatrixProducts {
 public:
  using Out = T;
  using Number = typename Unit::Number;
  static constexpr int parts = part_count<T, Number>, width = Vf::width, vectors = Tuning::vectors;
  using Matrix = MatrixBlock<Unit, parts>;
  using Output = OutputTile<float, T>;
  static constexpr int64_t side = Matrix::side, group = Matrix::depth;  // keys of a step
  static constexpr int64_t tile = Tuning::forward_panels * vectors * width, key_block = Tuning::matrix_forward_keys;
  static constexpr int64_t query_tiles = tile / side, key_tiles = key_block / side, key_steps = key_block / group;
  using Weights = NumberParts<Number, parts>;
  static constexpr bool narrow = __is_same(Number, f16), rounds = parts == 1, brief = rounds && !narrow;
  static constexpr bool own_scores = true, bias_is_overwritten = false;
  using Power = WeightPower<brief, narrow ? 64 : 1>;  // float16: up to 2^15, that of a row's largest score from 2^2 on
  static constexpr float weight_unit = Power::unit;
  static_assert(width == side && key_block % group == 0);
  static int64_t keys_at_once(const AttentionParams&) { return key_block; }

  static int64_t steps_of(int64_t dim) { return (dim + group - 1) / group; }
  static int64_t tiles_of(int64_t dim) { return (dim + side - 1) / side; }

  struct Buffers {
    uint32_t* query;       // of each tile the right side of sums over head_dim
    bf16 *key, *value_t;   // left sides of sums over head_dim, and over keys
    bf16* rows;            // of queries and values, a left side
    uint32_t* pairs;       // of values, the right side of sums over keys
    float *bias, *scores;  // [key_block][tile]; sums of a group of keys
    float* dropped;        // [group][tile]: weights before dropout
    uint32_t* weights;     // the right side of sums over keys
    float* output;         // [tile][sums_ld]
    Buffers(const AttentionParams& params, int64_t tiles, Scratch& scratch) {
      const int64_t D = steps_of(params.head_dim), Dv = steps_of(params.v_head_dim);
      query = scratch.take<uint32_t>(tiles * parts * query_tiles * Matrix::pairs * D);
      key = scratch.take<bf16>(parts * key_tiles * Matrix::numbers * D);
      value_t = scratch.take<bf16>(parts * key_tiles * Matrix::numbers * Dv);
      rows = scratch.take<bf16>(parts * Matrix::numbers * max_of(query_tiles * D, key_tiles * Dv));
      pairs = scratch.take<uint32_t>(key_tiles * Matrix::pairs * Dv);
      bias = scratch.take<float>(params.mask == MaskKind::none && !params.alibi ? 0 : key_block * tile);
      scores = scratch.take<float>(group * tile);
      dropped = scratch.take<float>(params.dropout.on() ? group * tile : 0);
      weights = scratch.take<uint32_t>(parts * key_block / 2 * tile);
      output = scratch.take<float>(tile * sums_ld<float>(params));
    }
  };

  float* const bias;

  // Rows that are not finite are taken as zeros, and whom they reach are `others`.
  MatrixProducts(const AttentionParams& params, const HeadPointers& head, const Buffers& buffers, const CallRows& rows,
                 const OtherRows& others)
      : bias(buffers.bias), params_(params), head_(head), buffers_(buffers), rows_(rows), others_(others) {}

  static bool writes_rows(const AttentionParams&) { return false; }
  static TileKeys whole_units(const TileKeys& seen) { return seen; }
  static bool reaches_past(const TileKeys&) { return false; }
  static bool values_finite() { return true; }

  ATTN_INLINE void pack_query(const QueryTile& rows) {
    const int64_t steps = steps_of(params_.head_dim), part = query_tiles * steps * Matrix::numbers;
    const int64_t used = tiles_of(rows.count);
    const T* const X = static_cast<const T*>(head_.query) + rows.first * params_.q_row;
    left_in_parts<Number>(X, params_.q_row, rows.count, params_.head_dim, buffers_.rows, used, part);
    each_row_out_of_range(X, params_.q_row, rows.count, params_.head_dim, [&](int64_t i) {
      zero_left_row(buffers_.rows, i, steps, parts, part);
      others_.add(rows.index * tile + i);
    });
    for (int p = 0; p < parts; p++)
      transpose_tiles(buffers_.rows + p * part, used * steps, query_of(rows) + p * part / 2);
  }

  ATTN_INLINE void load_block(int64_t k0, int64_t block, const PlacedRows<T>& keys, const PlacedRows<T>& values) {
    k0_ = k0;
    block_ = block;
    const int64_t used = steps_of(block) * 2, steps = steps_of(params_.v_head_dim), part = value_part();
    left_in_parts<Number>(keys.first, keys.ld, block, params_.head_dim, buffers_.key, used, key_part());
    left_in_parts<Number>(values.first, values.ld, block, params_.v_head_dim, buffers_.rows, used, part);
    each_row_out_of_range(keys.first, keys.ld, block, params_.head_dim, [&](int64_t i) {
      zero_left_row(buffers_.key, i, steps_of(params_.head_dim), parts, key_part());
      reaches(k0 + i);
    });
    each_row_out_of_range(values.first, values.ld, block, params_.v_head_dim, [&](int64_t i) {
      zero_left_row(buffers_.rows, i, steps, parts, part);
      reaches(k0 + i);
    });
    for (int p = 0; p < parts; p++) {
      zip_tiles(buffers_.rows + p * part, used, steps, steps, buffers_.pairs, key_steps * Matrix::pairs);
      transpose_tiles(buffers_.pairs, 2 * steps * key_steps, buffers_.value_t + p * part);
    }
  }

  ATTN_INLINE void weights(const QueryTile& rows, const RunningRows<float>& running, const TileKeys& seen,
                           MaskBlock masked, RowPrefetch& prefetch) {
    for (int64_t j = 0; j < rows.vectors_used; j++)
      queries_[j] = {load(running.reference + j * width), load(running.top + j * width), Vf::zero(), Vf::zero()};
    const TileScores scores(params_, head_, rows.first, k0_, masked);
    with_hidden(inside(masked), [&](auto hidden) {
      for (int64_t g = seen.begin / group * group; g < seen.end; g += group) {
        weights_of_group<hidden.value>(scores, rows, within(seen, g, g + group), masked);
        if (has_block(masked))
          for (int64_t k = 0; k < group; k += Tuning::rows) prefetch.step();
      }
    });
  }
  ATTN_INLINE Vf top(int64_t j) const { return queries_[j].top; }
  ATTN_INLINE void save_running(const QueryTile& rows, const RunningRows<float>& running) const {
    for (int64_t j = 0; j < rows.vectors_used; j++) {
      const auto add = [&](float* sum, Vf of_block) { store(sum, load(sum) + of_block); };
      store(running.top + j * width, queries_[j].top);
      add(running.total + j * width, queries_[j].total);
      if constexpr (brief) add(running.rounded + j * width, queries_[j].rounded);
    }
  }
  // Of float16 weights the sum of the rounded ones is taken to be that of all, but for the rounding of the largest: a
  // row of one key is its value.
  static void round_totals(const QueryTile& rows, const RunningRows<float>& running, float exponents) {
    for (int64_t i = 0; i < rows.vectors_used * width; i += width) {
      const Vf total = load(running.total + i), above = load(running.top + i) + load(running.reference + i);
      const Vf largest = Power()(above * Vf::set(exponents)), rounding = rounded_to_f16(largest) - largest;
      store(running.rounded + i, select(eq(total, Vf::zero()), total, total + rounding));
    }
  }
  static void drop(const QueryTile&, const TileKeys&) {}  // as weights are rounded

  ATTN_INLINE void add_values(const QueryTile& rows, const TileKeys& seen, const Output& output, RowPrefetch&) const {
    constexpr int64_t row = key_steps * Matrix::numbers, column = key_steps * Matrix::pairs;
    const int64_t dims = tiles_of(params_.v_head_dim);
    for (int64_t v = 0; v < rows.vectors_used; v += 2) {
      const int64_t last = min_of(rows.count, (v + 2) * width) - 1, columns = min_of(2, rows.vectors_used - v);
      int64_t from = 0, to = 0;
      if (!seen.empty()) {
        const TileKeys mine = tile_keys(params_.keys, rows.first + v * width, rows.first + last, k0_, block_);
        from = max_of(mine.begin, seen.begin) / group;
        to = max_of(from, steps_of(min_of(mine.end, seen.end)));
      }
      const MatrixSums sums{output.sums + v * Matrix::sums, query_tiles * Matrix::sums};
      const MatrixLeft left{buffers_.value_t + from * Matrix::numbers, row, value_part()};
      const MatrixRight right{buffers_.weights + v * column + from * Matrix::pairs, column, query_tiles * column};
      if (output.fresh)
        Matrix::template multiply<false>(left, dims, right, columns, to - from, sums);
      else if (from < to)
        Matrix::template multiply<true>(left, dims, right, columns, to - from, sums);
    }
  }
  static void add_values_guarded(const QueryTile&, const TileKeys&, const Output&) {}

  // one row is one column of the sums
  static ATTN_INLINE void scale_row(float* sums, int64_t ld, int64_t row, float factor) {
    for (int64_t d = 0; d < ld; d++)
      sums[(d / side * query_tiles + row / side) * Matrix::sums + d % side * side + row % side] *= factor;
  }
  ATTN_INLINE const float* rows_of(const QueryTile& rows, const float* sums) const {
    const int64_t ld = sums_ld<float>(params_);
    for (int64_t d = 0; d < tiles_of(params_.v_head_dim); d++)
      for (int64_t q = 0; q < rows.vectors_used; q++) {
        Vf t[side];
        ATTN_UNROLL for (int r = 0; r < side; r++) t[r] = load(sums + (d * query_tiles + q) * Matrix::sums + r * side);
        transpose(t);
        ATTN_UNROLL for (int r = 0; r < side; r++) store(buffers_.output + (q * side + r) * ld + d * side, t[r]);
      }
    return buffers_.output;
  }

 private:
  int64_t key_part() const { return key_tiles * Matrix::numbers * steps_of(params_.head_dim); }
  int64_t value_part() const { return key_tiles * Matrix::numbers * steps_of(params_.v_head_dim); }
  uint32_t* query_of(const QueryTile& rows) const {
    return buffers_.query + rows.index * parts * query_tiles * Matrix::pairs * steps_of(params_.head_dim);
  }
  ATTN_NOINLINE void reaches(int64_t key) const {
    for (int64_t r = 0; r < rows_.count; r++)
      if (sees<T>(params_, head_, rows_.first + r, key)) others_.add(r);
  }

  // The weights of the keys seen of one group; H: how keys inside are hidden
  template <Hidden H>
  ATTN_NOINLINE void weights_of_group(const TileScores& of_tile, const QueryTile& rows, const TileKeys& seen,
                                      MaskBlock masked) {
    const int64_t g = seen.begin / group, steps = steps_of(params_.head_dim);
    const int64_t row = steps * Matrix::numbers, column = steps * Matrix::pairs;
    const bool whole = seen.all_begin == g * group && seen.all_end == seen.all_begin + group;
    SeenLanes lanes{0, rows.vectors_used, whole};
    if (!whole)
      lanes = seen_lanes<width>(params_.keys, rows.first, rows.count, k0_ + seen.begin, seen.end - seen.begin);
    if (lanes.begin < lanes.end)
      Matrix::template multiply<false>({buffers_.key + 2 * g * row, row, key_part()}, 2,
                                       {query_of(rows) + lanes.begin * column, column, query_tiles * column},
                                       lanes.end - lanes.begin, steps,
                                       {buffers_.scores + lanes.begin * Matrix::sums, query_tiles * Matrix::sums});
    if (params_.modifier.on()) [[unlikely]]
      modify(lanes);
    for (int64_t v = 0; v < rows.vectors_used; v++) {
      if (v < lanes.begin || v >= lanes.end)
        clear(g, v);
      else if (whole)
        by_vector<H>(of_tile, g, v, seen);
      else if (has_block(masked))
        by_vector<Hidden::by_bias>(of_tile, g, v, seen);
      else
        by_vector<Hidden::by_range>(of_tile, g, v, seen);
    }
    if (params_.dropout.on()) {
      float* const P = buffers_.dropped - g * group * tile;
      drop_tile(params_.dropout, head_.index, rows.first, rows.count, k0_, seen.begin, seen.end, false, P, tile);
      weights_in_parts<Number, parts>(P, tile, g, seen.begin, seen.end, rows.vectors_used, nullptr, 0, weights_at(g, 0),
                                      key_steps * Matrix::pairs, key_block * tile);
    }
  }
  uint32_t* weights_at(int64_t g, int64_t v) const { return buffers_.weights + (v * key_steps + g) * Matrix::pairs; }
  // vector v sees none of the group
  void clear(int64_t g, int64_t v) const {
    if (params_.dropout.on())
      for (int64_t i = 0; i < group; i++) store(buffers_.dropped + i * tile + v * width, Vf::zero());
    else
      for (int p = 0; p < parts; p++) memset(weights_at(g, v) + p * key_block / 2 * tile, 0, Matrix::pairs * 4);
  }
  // products -> what they are with a score modifier
  ATTN_NOINLINE void modify(const SeenLanes& lanes) const {
    const Vf factor = Vf::set(query_factor<float>(params_));
    const Modifier<float> modifier(params_);
    for (int half = 0; half < 2; half++)
      for (int64_t v = lanes.begin; v < lanes.end; v++) {
        float* const x = buffers_.scores + (half * query_tiles + v) * Matrix::sums;
        if constexpr (brief) {
          modify_short(x, int(side), factor, modifier.cap);
        } else {
          for (int64_t i = 0; i < Matrix::sums; i += width) store(x + i, load(x + i) * factor);
          modify_scores(x, int(side), modifier);
        }
      }
  }
  template <Hidden H>
  ATTN_NOINLINE void by_vector(const TileScores& of_tile, int64_t g, int64_t v, const TileKeys& seen) {
    params_.dropout.on() ? by_vector<H, true>(of_tile, g, v, seen) : by_vector<H, false>(of_tile, g, v, seen);
  }
  template <Hidden H, bool Drops>
  ATTN_INLINE void by_vector(const TileScores& of_tile, int64_t g, int64_t v, const TileKeys& seen) {
    constexpr bool border = H == Hidden::by_range || H == Hidden::by_bias;  // the others are of whole groups
    const float* const scores = buffers_.scores + v * Matrix::sums;
    uint32_t* const to = weights_at(g, v);
    RunningQueries mine = queries_[v];
    for (int64_t i = 0; i < side; i++) {
      Vf weight[2];
      ATTN_UNROLL for (int half = 0; half < 2; half++) {
        const int64_t k = g * group + half * side + i;
        weight[half] = Vf::zero();
        if (border && (k < seen.begin || k >= seen.end)) continue;
        weight[half] = weight_of<H, Power>(of_tile, load(scores + half * query_tiles * Matrix::sums + i * side),
                                           v * width, k, bias + k * tile + v * width, mine);
      }
      mine.total = mine.total + (weight[0] + weight[1]);
      if constexpr (brief)
        mine.rounded = mine.rounded + (upper_bits(raised_half(weight[0])) + upper_bits(raised_half(weight[1])));
      if constexpr (Drops) {
        ATTN_UNROLL for (int half = 0; half < 2; half++)
            store(buffers_.dropped + (half * side + i) * tile + v * width, weight[half]);
      } else {
        const Weights low(weight[0]), high(weight[1]);
        ATTN_UNROLL for (int p = 0; p < parts; p++)
            store_pairs(to + p * key_block / 2 * tile + i * side, Weights::join(low.part[p], high.part[p]));
      }
    }
    queries_[v] = mine;
  }

  const AttentionParams& params_;
  const HeadPointers& head_;
  const Buffers& buffers_;
  const CallRows rows_;
  const OtherRows others_;
  RunningQueries queries_[tile / width];
  int64_t k0_ = 0, block_ = 0;               // the key block
  [[no_unique_address]] const Unit unit_{};  // from here on the unit's registers have their shape
};

}  // namespace
}  // namespace attnjourney
