// Attention's jvp in bfloat16 with products of pairs: the formulas of attention/jvp.h on the tiles of
// attention/pair_tiles.h.
//
// P and P A are rounded to bfloat16 for their products with dV and V. d(lse) comes from the numbers before that: exp2
// is the exact one, and sums over keys keep what rounding takes, a group of keys at a time. What d(out) subtracts is
// the sum of the rounded P A, so that the share of V that all keys have in common cancels.
#pragma once
#include "cpu/kernels/common/score_modifier.h"
#include "cpu/kernels/common/scratch.h"
#include "pair_stream.h"
#include "tangent_stages.h"

namespace attnjourney {
namespace {

// The weights, the tangents of the scores, their products, and sums of both over the keys.
struct JvpEpilogue {
  static constexpr int width = Vf::width, most = 3;
  static constexpr int64_t tile = PairTiles::tile;
  static constexpr bool modifies = true;
  static constexpr Hidden kind(Hidden hidden) {
    return hidden == Hidden::by_sum ? Hidden::by_bias : hidden == Hidden::by_alibi ? Hidden::by_range : hidden;
  }
  struct Sums {                                                  // of a query tile
    float shift[tile], inverse[tile], least[tile];               // see QueryRows in stages.h
    float mu[tile], mu_low[tile], total[tile], total_low[tile];  // sums of P A and of P, and what rounding took
    float rounded[tile];                                         // sum of the rounded P A
  };

  PairTask task;
  PairTerm terms[most];  // of A, then that of S
  int count;
  bool moves;                       // there is an A
  uint32_t *weights, *tangents;     // [key / 2][tile]: P, P A
  const float *bias, *bias_change;  // [key][tile]: what is added to S; its tangent, or null
  Sums* sums;
  Vf scale, change, factor;  // plain_factor; of A; query_factor
  Vf exponents;              // of a score beside a mask

  ATTN_INLINE void clear(int64_t at) const {
    store_pairs(weights + at, Pairs{});
    store_pairs(tangents + at, Pairs{});
  }
  // One more term of a long sum (Knuth's sum of two).
  static ATTN_INLINE void add_term(Vf x, float* sum_at, float* low_at) {
    const Vf sum = load(sum_at), next = sum + x, part = next - sum;
    store(low_at, load(low_at) + ((sum - (next - part)) + (x - part)));
    store(sum_at, next);
  }
  struct Queries {};
  static constexpr Queries* queries = nullptr;
  struct Cursor {
    int64_t lane;
    ATTN_INLINE void next_vector() { lane += width; }
    ATTN_INLINE void next_keys(int vectors) { lane -= vectors * width; }
  };
  ATTN_INLINE Cursor cursor(int64_t lane, int64_t, Queries*) const { return {lane}; }
  template <Hidden H>
  ATTN_INLINE void softmax(const PendingScores& pending, const Vf (&scores)[2], const Cursor& cursor) const {
    constexpr bool guard = H == Hidden::by_range || H == Hidden::by_bias;
    const Alibi<float>& alibi = task.alibi;
    const int64_t lane = cursor.lane, at = pending.key / 2 * tile + lane;
    const Vf shift = load(sums->shift + lane), inverse = load(sums->inverse + lane), least = load(sums->least + lane),
             zero = Vf::zero();
    const auto weigh = [&](Vf exponent) { return exp2(exponent, least) * inverse; };
    Vf weight[2] = {zero, zero}, tangent[2] = {zero, zero};
    ATTN_UNROLL for (int r = 0; r < 2; r++) {
      const int64_t key = pending.key + r;
      if (guard && key >= pending.end) break;  // a last single key is paired with weight 0
      const Vf score = scores[r] * scale;      // rounded as in the forward
      if constexpr (H == Hidden::by_bias) {
        const Vf added = load(bias + key * tile + lane);
        weight[r] = select(eq(added, Vf::set(-__builtin_inff())), zero, weigh(((score + added) + shift) * exponents));
      } else if (H == Hidden::by_range && alibi.on) {
        const Vf distance = alibi.distance(Vf::iota(), lane, key);
        weight[r] = weigh(alibi.add(score, distance) + shift);
      } else {
        weight[r] = weigh(score + shift);
      }
      if constexpr (H == Hidden::by_range) {
        const auto range = lane_range<float>(*task.keys, task.first_row + lane, task.k0 + key);
        weight[r] = select(range.visible(Vf::iota()), weight[r], zero);
      }
      if (!moves) continue;
      Vf score_change = load(pending.others + r * width) * change;
      if (bias_change) score_change = score_change + load(bias_change + key * tile + lane);
      tangent[r] = weight[r] * score_change;
      if constexpr (guard) tangent[r] = select(eq(weight[r], zero), zero, tangent[r]);  // a hidden NaN stays hidden
    }
    store_pairs(weights + at, round_pairs(weight[0], weight[1]));
    if (!moves) return;
    const Pairs rounded = round_pairs(tangent[0], tangent[1]);
    store_pairs(tangents + at, rounded);
    store(sums->rounded + lane, add_pairs(load(sums->rounded + lane), rounded));
    float* const group = pending.sums + 2 * width * pending.vector;
    Vf mu = tangent[0] + tangent[1], total = weight[0] + weight[1];
    if (pending.key > pending.begin) {
      mu = mu + load(group);
      total = total + load(group + width);
    }
    if (pending.key + 2 < pending.end) {
      store(group, mu);
      store(group + width, total);
    } else {
      add_term(mu, sums->mu + lane, sums->mu_low + lane);
      add_term(total, sums->total + lane, sums->total_low + lane);
    }
  }
  // scores -> modified ones, and their tangents by the derivative
  ATTN_NOINLINE void modify(float* x, float* changes, int n) const {
    alignas(64) float states[PairTiles::rows * PairTiles::vectors * width];
    for (int i = 0; i < n; i++) store(x + i * width, load(x + i * width) * factor);
    modify_scores(x, n, task.modifier, states);
    for (int i = 0; i < n; i++)
      store(changes + i * width, load(changes + i * width) * task.modifier.slope(load(states + i * width)));
  }
};

class PairJvp : public PairTiles {
  using Sums = JvpEpilogue::Sums;
  struct QueryRows : QueryTile {
    Sums* sums;
    uint32_t *query, *tangent;  // panels [pairs][panel]
    float* output;              // [tile][value_ld]
    bool started;               // it holds something
  };

  struct Buffers {
    int64_t tiles_used, pairs, row_ld, value_ld;
    QueryRows tiles[Tuning::forward_tiles];
    bf16* query_rows;                   // [tile][row_ld]
    uint32_t *weights, *tangents;       // [key_block / 2][tile]: P, P A
    float *bias, *bias_change;          // [key_block][tile]
    bf16 *keys, *key_tangents;          // [key_block][row_ld], copies
    uint32_t *values, *value_tangents;  // [key_block / 2][value_ld], zipped
    Buffers(const AttentionParams& params, int64_t rows, Scratch& scratch)
        : tiles_used((rows + tile - 1) / tile),
          pairs(round_up(params.head_dim, 2) / 2),
          row_ld(round_up(params.head_dim, 32)),
          value_ld(round_up(params.v_head_dim, width)) {
      for (int64_t i = 0; i < tiles_used; i++) {
        tiles[i].sums = scratch.take<Sums>(1);
        tiles[i].query = scratch.take<uint32_t>(tile * pairs);
        tiles[i].tangent = scratch.take<uint32_t>(tile * pairs);
        tiles[i].output = scratch.take<float>(tile * value_ld);
      }
      query_rows = scratch.take<bf16>(tile * row_ld);
      weights = scratch.take<uint32_t>(key_block / 2 * tile);
      tangents = scratch.take<uint32_t>(key_block / 2 * tile);
      bias = scratch.take<float>(params.mask == MaskKind::none && !params.alibi ? 0 : key_block * tile);
      bias_change = scratch.take<float>(key_block * tile);
      keys = scratch.take<bf16>(key_block * row_ld);
      key_tangents = scratch.take<bf16>(key_block * row_ld);
      values = scratch.take<uint32_t>(key_block / 2 * value_ld);
      value_tangents = scratch.take<uint32_t>(key_block / 2 * value_ld);
    }
  };

 public:
  static constexpr int64_t key_block = Tuning::pairs_jvp_keys;

  static int64_t space(const AttentionParams& params, int64_t rows) { return scratch_bytes<Buffers>(params, rows); }

  // Rows first .. first + count - 1 of one head, at most Tuning::forward_tiles tiles. False if they are another
  // kernel's: see Forward.
  static bool run(const AttentionParams& params, const HeadPointers& head, const HeadTangents& tangents, int64_t first,
                  int64_t count, void* space) {
    const ScoreUnit unit = score_unit(params);
    for (int64_t r = first; r < first + count; r++)
      if (!scores_repeat(row_stats<float>(head, r, unit).reference, unit)) return false;
    PairJvp pass(params, head, tangents, count, space);
    pass.walk(first, count);
    return pass.precise_;
  }

 private:
  PairJvp(const AttentionParams& params, const HeadPointers& head, const HeadTangents& tangents, int64_t count,
          void* space)
      : params_(params),
        head_(head),
        tangents_(tangents),
        scores_(tangents.scores()),
        buffers_(buffers_in<Buffers>(space, params, count)) {}

  void walk(int64_t first, int64_t count) {
    for (int64_t i = 0; i < buffers_.tiles_used; i++) {
      const int64_t n = min_of(tile, count - i * tile);
      prepare({i, first + i * tile, n, (n + width - 1) / width}, buffers_.tiles[i]);
    }
    if (scores_ || tangents_.value) {
      KeyWalk walk(params_, head_, first, count, key_block);
      do {
        load_block(walk.k0, walk.block);
        for (int64_t i = 0; i < buffers_.tiles_used; i++) step(buffers_.tiles[i]);
      } while (walk.next());
    }
    for (int64_t i = 0; i < buffers_.tiles_used; i++) finish(buffers_.tiles[i]);
  }

  void prepare(const QueryTile& place, QueryRows& rows) {
    static_cast<QueryTile&>(rows) = place;
    rows.started = false;
    const auto pack = [&](const void* X, int64_t ld, uint32_t* panels) {
      pack_panels(static_cast<const bf16*>(X) + rows.first * ld, ld, rows.count, params_.head_dim, buffers_.query_rows,
                  buffers_.row_ld, panels);
    };
    pack(head_.query, params_.q_row, rows.query);
    if (tangents_.query) pack(tangents_.query, tangents_.q_row, rows.tangent);
    memset(rows.sums, 0, sizeof(Sums));
    const ScoreUnit unit = score_unit(params_);
    for (int64_t r = 0; r < rows.count; r++) {
      const RowStats<float> stats = row_stats<float>(head_, rows.first + r, unit);
      rows.sums->shift[r] = -stats.reference;
      rows.sums->inverse[r] = stats.inverse;
      rows.sums->least[r] = least_exponent(stats.inverse);
    }
  }

  void load_block(int64_t k0, int64_t block) {
    k0_ = k0;
    block_ = block;
    // rows of a dense matrix are read in place; others and odd ones from a copy
    const auto keys = [&](const void* X, int64_t ld, bf16* copy) -> PairTerm {
      const bf16* const rows = static_cast<const bf16*>(X) + k0 * ld;
      if (params_.head_dim % 2 == 0 && ld * 2 < 1024) return {rows, ld, nullptr};
      copy_rows(rows, ld, block, params_.head_dim, copy, buffers_.row_ld);
      return {copy, buffers_.row_ld, nullptr};
    };
    const auto zip = [&](const void* X, int64_t ld, uint32_t* to) {
      return zip_rows(static_cast<const bf16*>(X) + k0 * ld, ld, block, params_.v_head_dim, to, buffers_.value_ld);
    };
    key_ = keys(head_.key, params_.k_row, buffers_.keys);
    if (tangents_.key) key_tangent_ = keys(tangents_.key, tangents_.k_row, buffers_.key_tangents);
    if (scores_) values_finite_ = zip(head_.value, params_.v_row, buffers_.values);
    if (tangents_.value) tangents_finite_ = zip(tangents_.value, tangents_.v_row, buffers_.value_tangents);
  }

  // One tile against the key block.
  void step(QueryRows& rows) {
    const TileKeys seen = whole_pairs(seen_keys(params_, head_, rows.first, rows.first + rows.count - 1, k0_, block_));
    if (seen.empty()) return;
    MaskBlock masked = MaskBlock::all_visible;
    if (params_.mask != MaskKind::none || params_.alibi)
      masked = load_bias<bf16, true>(params_, head_, rows.first, rows.count, k0_, seen, buffers_.bias, tile);
    if (masked == MaskBlock::all_hidden) return;
    weights(rows, seen, masked);
    if (params_.dropout.on())
      drop(params_.dropout, head_.index, rows, k0_, seen, buffers_.weights, scores_ ? buffers_.tangents : nullptr);
    add_values(rows, seen, has_block(masked));
    rows.started = true;
  }

  // P and P A of the keys seen
  void weights(const QueryRows& rows, const TileKeys& seen, MaskBlock masked) {
    const bool bias_changes = tangents_.mask || tangents_.slope != 0;
    if (bias_changes)
      load_tangent_bias<bf16>(params_, tangents_, rows.first, rows.count, k0_ + seen.begin, seen.end - seen.begin,
                              buffers_.bias_change + seen.begin * tile, tile);
    RowPrefetch nothing;
    JvpEpilogue epilogue{.task = {.pairs = buffers_.pairs,
                                  .vectors_used = rows.vectors_used,
                                  .keys = &params_.keys,
                                  .first_row = rows.first,
                                  .k0 = k0_,
                                  .modifier = Modifier<float>(params_),
                                  .alibi = alibi_of<float>(params_, head_, rows.first, k0_, masked),
                                  .prefetch = &nothing},
                         .terms = {},
                         .count = 0,
                         .moves = scores_,
                         .weights = buffers_.weights,
                         .tangents = buffers_.tangents,
                         .bias = buffers_.bias,
                         .bias_change = bias_changes ? buffers_.bias_change : nullptr,
                         .sums = rows.sums,
                         .scale = Vf::set(plain_factor(params_)),
                         .change = Vf::set(float(params_.scale)),
                         .factor = Vf::set(query_factor<float>(params_)),
                         .exponents = Vf::set(float(score_unit(params_).exponents))};
    const auto add = [&](const PairTerm& key, const uint32_t* query) {
      epilogue.terms[epilogue.count++] = {key.X, key.ld, query};
    };
    if (tangents_.query) add(key_, rows.tangent);
    if (tangents_.key) add(key_tangent_, rows.query);
    add(key_, rows.query);
    PairStream<JvpEpilogue>::all(epilogue, seen, rows.count, masked);
  }

  // output += (P A) V + P dV
  void add_values(const QueryRows& rows, const TileKeys& seen, bool bias) {
    const int64_t ld = buffers_.value_ld;
    const bool beyond = seen.end % 2 && seen.end < block_;  // products reach a key that no row sees
    const bool hides = bias || beyond || seen.all_begin > seen.begin || seen.all_end < seen.end;
    const bool guard_values = hides && !values_finite_, guard_tangents = hides && !tangents_finite_;
    const auto terms = [&](const uint32_t* weights, const uint32_t* values, int64_t pair, int64_t r, int64_t n) {
      return WeightedValues{weights + pair * tile + r, values + pair * ld, n};
    };
    const Output output{.sums = rows.output,
                        .ld = ld,
                        .columns = ld,
                        .fresh = !rows.started,
                        .out = nullptr,
                        .out_ld = 0,
                        .inverse = nullptr};
    each_row_group(params_.keys, rows, k0_, block_, seen, [&](int64_t r, auto m, const KeyRange& keys) {
      const int64_t begin = keys.begin / 2, n = max_of(0, (keys.end + 1) / 2 - begin);
      value_rows<m.count>(
          output, r, terms(buffers_.tangents, buffers_.values, begin, r, scores_ && !guard_values ? n : 0),
          terms(buffers_.weights, buffers_.value_tangents, begin, r, tangents_.value && !guard_tangents ? n : 0));
    });
    const int64_t begin = seen.begin / 2, n = (seen.end - seen.begin + 1) / 2;
    if (scores_ && guard_values)
      value_rows_guarded(terms(buffers_.tangents, buffers_.values, begin, 0, n), rows.count, output);
    if (tangents_.value && guard_tangents)
      value_rows_guarded(terms(buffers_.weights, buffers_.value_tangents, begin, 0, n), rows.count, output);
  }

  ATTN_NOINLINE void finish(const QueryRows& rows) {
    constexpr float largest = 1024;  // a mean that is taken from sums in float32, which then still has bfloat16's bits
    if (!rows.started) memset(rows.output, 0, size_t(tile * buffers_.value_ld) * 4);
    const Sums& sums = *rows.sums;
    for (int64_t r = 0; r < rows.count; r++) {
      const int64_t row = rows.first + r;
      const RowMean<float> mean(params_, head_, tangents_, row, sums.total[r] + sums.total_low[r]);
      const float mu = mean.of(sums.mu[r] + sums.mu_low[r]);
      static_cast<float*>(tangents_.lse)[row] = mu;
      precise_ = precise_ && !(mu > largest || mu < -largest);
      write_tangent<bf16>(params_, head_, tangents_, row, mean.of(sums.rounded[r]), mean.inverse,
                          rows.output + r * buffers_.value_ld);
    }
  }

  const AttentionParams& params_;
  const HeadPointers& head_;
  const HeadTangents& tangents_;
  bool precise_ = true;  // else the rows are another kernel's, which takes the mean from the tangents of the scores
  const bool scores_;    // any score changes
  Buffers buffers_;
  // the key block
  int64_t k0_ = 0, block_ = 0;
  PairTerm key_{}, key_tangent_{};
  bool values_finite_ = true, tangents_finite_ = true;
};

}  // namespace
}  // namespace attnjourney
