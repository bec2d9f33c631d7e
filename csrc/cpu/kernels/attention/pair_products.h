// The forward's products by pairs of bfloat16 numbers (vdpbf16ps), at twice the rate of float32.
//
// S^T = K Q^T: pairs of neighbours along head_dim, K broadcast in place, Q^T packed as it is; the scale comes after the
// product. O = P V: pairs of keys, P rounded to bfloat16 in the epilogue (attention/pair_epilogue.h), V zipped once per
// key block.
#pragma once
#include "cpu/kernels/common/pack.h"
#include "cpu/kernels/common/scratch.h"
#include "paged_rows.h"
#include "pair_epilogue.h"

namespace attnjourney {
namespace {

class PairProducts : public PairTiles, public SumsByRows {
 public:
  using Out = bf16;
  static constexpr int64_t key_block = Tuning::pairs_forward_keys;
  static constexpr bool rounds = true, narrow = false, own_scores = true, bias_is_overwritten = false;
  static constexpr float weight_unit = exp2_unit;
  static_assert(key_block % 2 == 0);
  static int64_t keys_at_once(const AttentionParams&) { return key_block; }

  struct Buffers {
    int64_t pairs, row_ld, value_ld;
    uint32_t* query;    // panels [pairs][panel] of each tile
    bf16* query_rows;   // [tile][row_ld]
    uint32_t* weights;  // [key_block / 2][tile]
    float* bias;        // [key_block][tile]
    bf16* keys;         // [key_block][row_ld]
    uint32_t* values;   // [key_block / 2][value_ld], zipped
    Buffers(const AttentionParams& params, int64_t tiles, Scratch& scratch)
        : pairs((params.head_dim + 1) / 2),
          row_ld(round_up(params.head_dim, 32)),
          value_ld(sums_ld<float>(params)),
          query(scratch.take<uint32_t>(tiles * tile * pairs)),
          query_rows(scratch.take<bf16>(tile * row_ld)),
          weights(scratch.take<uint32_t>(key_block / 2 * tile)),
          bias(scratch.take<float>(params.mask == MaskKind::none && !params.alibi ? 0 : key_block * tile)),
          keys(scratch.take<bf16>(key_block * row_ld)),
          values(scratch.take<uint32_t>(key_block / 2 * value_ld)) {}
  };

  float* const bias;

  PairProducts(const AttentionParams& params, const HeadPointers& head, const Buffers& buffers, const CallRows&,
               const OtherRows&)
      : bias(buffers.bias), params_(params), head_(head), buffers_(buffers) {}

  static ATTN_INLINE bool writes_rows(const AttentionParams& params) { return params.v_head_dim % width == 0; }
  static ATTN_INLINE TileKeys whole_units(const TileKeys& seen) { return whole_pairs(seen); }
  ATTN_INLINE bool reaches_past(const TileKeys& seen) const { return seen.end % 2 && seen.end < block_; }

  ATTN_INLINE void pack_query(const QueryTile& rows) const {
    pack_panels(static_cast<const bf16*>(head_.query) + rows.first * params_.q_row, params_.q_row, rows.count,
                params_.head_dim, buffers_.query_rows, buffers_.row_ld, query_of(rows));
  }

  // Keys are read in place where their rows are dense.
  ATTN_INLINE void load_block(int64_t k0, int64_t block, const PlacedRows<bf16>& keys, const PlacedRows<bf16>& values) {
    k0_ = k0;
    block_ = block;
    keys_ = keys.first;
    key_ld_ = keys.ld;
    if (params_.head_dim % 2 != 0 || key_ld_ * 2 >= 1024) {
      copy_rows(keys_, key_ld_, block, params_.head_dim, buffers_.keys, buffers_.row_ld);
      keys_ = buffers_.keys;
      key_ld_ = buffers_.row_ld;
    }
    values_finite_ = zip_rows(values.first, values.ld, block, params_.v_head_dim, buffers_.values, buffers_.value_ld);
  }

  ATTN_INLINE void weights(const QueryTile& rows, const RunningRows<float>& running, const TileKeys& seen,
                           MaskBlock masked, RowPrefetch& prefetch) {
    load_running(rows, running);
    PairStream<ForwardEpilogue>::all(epilogue(rows, masked, prefetch), seen, rows.count, masked);
  }
  ATTN_INLINE Vf top(int64_t j) const { return queries_[j].top; }
  ATTN_INLINE void save_running(const QueryTile& rows, const RunningRows<float>& running) const {
    for (int64_t j = 0; j < rows.vectors_used; j++) {
      const auto add = [&](float* sum, Vf of_block) { store(sum, load(sum) + of_block); };
      store(running.top + j * width, queries_[j].top);
      add(running.total + j * width, queries_[j].total);
      add(running.rounded + j * width, queries_[j].rounded);
    }
  }

  ATTN_INLINE void drop(const QueryTile& rows, const TileKeys& seen) const {
    PairTiles::drop(params_.dropout, head_.index, rows, k0_, seen, buffers_.weights);
  }
  ATTN_INLINE bool values_finite() const { return values_finite_; }
  ATTN_INLINE void add_values(const QueryTile& rows, const TileKeys& seen, const Output& output, RowPrefetch&) const {
    each_row_group(params_.keys, rows, k0_, block_, seen, [&](int64_t r, auto m, const KeyRange& keys) {
      const int64_t begin = keys.begin / 2, n = (keys.end + 1) / 2 - begin;
      value_rows<m.count>(output, r,
                          WeightedValues{buffers_.weights + begin * tile + r,
                                         buffers_.values + begin * buffers_.value_ld, max_of(0, n)});
    });
  }
  ATTN_INLINE void add_values_guarded(const QueryTile& rows, const TileKeys& seen, const Output& output) const {
    value_rows_guarded(weighted_values(seen), rows.count, output);
  }

 protected:
  uint32_t* query_of(const QueryTile& rows) const { return buffers_.query + rows.index * tile * buffers_.pairs; }
  WeightedValues weighted_values(const TileKeys& seen) const {
    return {buffers_.weights + seen.begin / 2 * tile, buffers_.values + seen.begin / 2 * buffers_.value_ld,
            (seen.end - seen.begin + 1) / 2};
  }
  ATTN_INLINE void load_running(const QueryTile& rows, const RunningRows<float>& running) {
    for (int64_t j = 0; j < rows.vectors_used; j++)
      queries_[j] = {load(running.reference + j * width), load(running.top + j * width), Vf::zero(), Vf::zero()};
  }
  ATTN_INLINE ForwardEpilogue epilogue(const QueryTile& rows, MaskBlock masked, RowPrefetch& prefetch) {
    return {.task = {.pairs = buffers_.pairs,
                     .vectors_used = rows.vectors_used,
                     .keys = &params_.keys,
                     .first_row = rows.first,
                     .k0 = k0_,
                     .modifier = Modifier<float>(params_),
                     .alibi = alibi_of<float>(params_, head_, rows.first, k0_, masked),
                     .prefetch = &prefetch},
            .terms = {{keys_, key_ld_, query_of(rows)}},
            .queries = queries_,
            .bias = bias,
            .weights = buffers_.weights,
            .factor = Vf::set(query_factor<float>(params_)),
            .scores = {params_, head_, rows.first, k0_, masked}};
  }

  const AttentionParams& params_;
  const HeadPointers& head_;
  const Buffers& buffers_;
  RunningQueries queries_[tile / width];
  // the key block
  int64_t k0_ = 0, block_ = 0, key_ld_ = 0;
  const bf16* keys_ = nullptr;
  bool values_finite_ = true;
};

}  // namespace
}  // namespace attnjourney
