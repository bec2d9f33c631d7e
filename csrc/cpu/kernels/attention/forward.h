// Attention forward: online softmax over key blocks (Dao et al. 2022, arXiv 2205.14135; Rabe and Staats 2021,
// arXiv 2112.05682), O(len) memory.
//
// The walk over query tiles and key blocks, the running state of the rows and what becomes of it stand here. Scores,
// weights and their products with values come from Products: attention/plain_products.h in the precision of the
// arithmetic, attention/pair_products.h by pairs of bfloat16 numbers, attention/matrix_products.h on a matrix unit.
//
// exp2 is applied on the accumulators against a reference that starts at 0 and moves, with that block redone, only when
// a row's maximum leaves (-40, 60) in log2 units, (-4, 9) for weights in float16: no pass for the maximum, no rescaling
// per block. Rows whose values are too large or too small for weights against such a reference are computed again,
// against their maximum.
#pragma once
#include "attention/params.h"
#include "cpu/dispatch.h"
#include "cpu/kernels/common/log_sum.h"
#include "cpu/kernels/common/pack.h"
#include "cpu/kernels/common/scratch.h"
#include "forward_tile.h"
#include "key_walk.h"
#include "paged_rows.h"

namespace attnjourney {
namespace {

// Products: made of (params, head, buffers, rows, others) for one call. P: the weights, kept in its buffers.
//   Buffers(params, tiles, scratch)
//   tile, keys_at_once(params)  queries, keys of a block
//   Out, writes_rows(params)    rows of out that it can write in place of sums, and whether it does
//   rounds, weight_unit         products with values take rounded weights; what P is counted in
//   narrow                      products with values take weights as float16 numbers
//   own_scores                  of large scores the last bits are not those that derivatives compute
//   pack_query(tile)            Q^T
//   load_block(k0, keys, K, V)  a key block and where its rows lie (PlacedRows), to which all that follows refers
//   whole_units(seen)           keys that it can take without taking others
//   bias, bias_is_overwritten   [key][tile]: what is added to the scores, read by `weights` or replaced by P
//   weights(tile, running, seen, masked, prefetch)   P of the keys seen
//   top(j)                      the largest scores of vector j of the tile
//   save_running(tile, running) the running state after that
//   round_totals(tile, running) the sums of the rounded weights, where `narrow`
//   drop(tile, seen)            dropout on P
//   reaches_past(seen)          whether products with values take in keys that no row sees
//   values_finite()             whether every value of the block is
//   scale_row(sums, ld, row, x), rows_of(tile, sums)   of the tile's sums of values: a row, and all rows [row][ld]
//   add_values(tile, seen, output, prefetch), add_values_guarded(tile, seen, output)
// Stored: of queries, keys and values, T: of the output.
template <class T, class Products, class Stored = T>
class Forward {
 public:
  using Real = Compute<T>;
  static constexpr int width = Vec<Real>::width;
  static constexpr int64_t tile = Products::tile;
  static constexpr int64_t tiles = Tuning::forward_tiles;  // that share a key block

  static int64_t key_block(const AttentionParams& params) { return Products::keys_at_once(params); }
  static int64_t space(const AttentionParams& params, int64_t rows) { return scratch_bytes<Buffers>(params, rows); }

  // Rows first .. first + count - 1 (count <= tiles * tile) of one head. `plain`, if the products are not of the
  // arithmetic's precision: the kernel that computes rows again whose scores are so large that their last bits matter,
  // and are not those that derivatives compute; and rows that numbers reach which the products do not take.
  static void run(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t count, void* space,
                  decltype(AttentionKernels::forward) plain = nullptr) {
    uint8_t others[tiles * tile];
    bool any = false;
    if constexpr (Products::own_scores) memset(others, 0, sizeof others);
    {
      Forward pass(params, head, first, count, false, space, {others, any});
      if (!pass.pass()) Forward(params, head, first, count, true, space, {others, any}).pass();
    }
    for (int64_t r = 0; any && r < count; r++) {
      int64_t n = 0;
      while (r + n < count && others[r + n]) n++;
      if (n) plain(params, head, first + r, n, space);
      r += n;
    }
  }

 private:
  struct Buffers {
    int64_t tiles_used, output_ld;
    typename Products::Buffers products;
    Real* output;               // [tiles][tile][output_ld]
    RunningRows<Real> running;  // [tiles][tile]
    Real* inverse;              // [tile]
    Stored *keys, *values;      // [key_block], of pages
    Buffers(const AttentionParams& params, int64_t rows, Scratch& scratch)
        : tiles_used((rows + tile - 1) / tile),
          output_ld(sums_ld<Real>(params)),
          products(params, tiles_used, scratch),
          output(scratch.take<Real>(tiles_used * tile * output_ld)) {
      const int64_t n = tiles_used * tile;
      running = {scratch.take<Real>(n), scratch.take<Real>(n), scratch.take<Real>(n), nullptr};
      running.rounded = Products::rounds ? scratch.take<Real>(n) : running.total;
      inverse = scratch.take<Real>(tile);
      const int64_t paged = params.page_size ? key_block(params) : 0;
      keys = scratch.take<Stored>(paged * PagedRows<Stored>::line(params.head_dim));
      values = scratch.take<Stored>(paged * PagedRows<Stored>::line(params.v_head_dim));
    }
  };

  Forward(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t count, bool again,
          void* space, const OtherRows& others)
      : params_(params),
        head_(head),
        first_(first),
        count_(count),
        again_(again),
        unit_(score_unit(params)),
        buffers_(buffers_in<Buffers>(space, params, count)),
        others_(others),
        products_(params, head, buffers_.products, {first, count}, others_) {}

  // False if rows are to be computed again: their largest scores are then where the next pass finds them.
  ATTN_NOINLINE bool pass() {
    for (int64_t t = 0; t < buffers_.tiles_used; t++) {
      products_.pack_query(tile_at(t));
      const RunningRows<Real> running = buffers_.running.of_tile(t * tile);
      for (int64_t i = 0; i < tile; i++) {
        running.reference[i] = again_ && running.top[i] > unseen ? -running.top[i] : Real(0);
        running.total[i] = running.rounded[i] = Real(0);
        running.top[i] = unseen;
      }
      started_[t] = false;
    }
    KeyWalk walk(params_, head_, first_, count_, key_block(params_));
    const PagedRows<Stored> keys{params_.k_row, params_.k_page, params_.head_dim, buffers_.keys},
        values{params_.v_row, params_.v_page, params_.v_head_dim, buffers_.values};
    do {
      products_.load_block(walk.k0, walk.block, placed(head_.key, keys, walk), placed(head_.value, values, walk));
      for (int64_t t = 0; t < buffers_.tiles_used; t++) step(walk, tile_at(t));
    } while (walk.next());
    return settled_;
  }

  // the rows of a key block
  ATTN_INLINE PlacedRows<Stored> placed(const void* base, const PagedRows<Stored>& rows, const KeyWalk& walk) const {
    return rows.placed(static_cast<const Stored*>(base), head_.pages, params_.page_size, walk.k0, walk.block);
  }

  QueryTile tile_at(int64_t t) const {
    const int64_t count = min_of(tile, count_ - t * tile);
    return {t, first_ + t * tile, count, (count + width - 1) / width};
  }

  // One tile against one key block.
  ATTN_INLINE void step(const KeyWalk& walk, const QueryTile& rows) {
    const int64_t last_row = rows.first + rows.count - 1;
    const bool last = walk.last(rows.first, last_row);
    TileKeys seen = Products::whole_units(seen_keys(params_, head_, rows.first, last_row, walk.k0, walk.block));
    if (seen.empty() && !last) return;
    const RunningRows<Real> running = buffers_.running.of_tile(rows.index * tile);
    Real* const sums = buffers_.output + rows.index * tile * buffers_.output_ld;

    RowPrefetch prefetch;
    prefetch_next(walk, rows.index + 1, prefetch);
    const MaskBlock masked = weights(rows, running, sums, walk.k0, seen, prefetch);
    if (params_.dropout.on() && !seen.empty()) products_.drop(rows, seen);
    if (last) finish_rows(rows, running);

    const bool some_hidden =
        may_hide(masked) || products_.reaches_past(seen) || seen.all_begin > seen.begin || seen.all_end < seen.end;
    const bool guarded = some_hidden && !products_.values_finite();
    T* const out = static_cast<T*>(head_.out) + rows.first * params_.out_row;
    using Out = typename Products::Out;
    const bool direct = last && !guarded && Products::writes_rows(params_);
    const OutputTile<Real, Out> output{.sums = sums,
                                       .ld = buffers_.output_ld,
                                       .columns = round_up(params_.v_head_dim, width),
                                       .fresh = !started_[rows.index],
                                       .out = direct ? reinterpret_cast<Out*>(out) : nullptr,
                                       .out_ld = params_.out_row,
                                       .inverse = buffers_.inverse};
    products_.add_values(rows, guarded ? TileKeys{0, 0, 0, 0} : seen, output, prefetch);
    if (guarded) products_.add_values_guarded(rows, seen, output);
    started_[rows.index] = true;
    if (last && !direct) {
      const Real* const row_sums = products_.rows_of(rows, sums);
      for (int64_t i = 0; i < rows.count; i++)
        unpack_rows<T>(row_sums + i * output.ld, output.ld, 1, params_.v_head_dim, output.inverse[i],
                       out + i * params_.out_row, params_.out_row);
    }
    if (last && !again_) look_again(rows, running, out);
  }

  // the mask of the step after this one
  ATTN_INLINE void prefetch_next(const KeyWalk& walk, int64_t next, RowPrefetch& prefetch) const {
    const bool same_keys = next < buffers_.tiles_used;
    const QueryTile rows = tile_at(same_keys ? next : 0);
    const int64_t k0 = same_keys ? walk.k0 : walk.k0 + walk.block;
    const int64_t keys = same_keys ? walk.block : min_of(key_block(params_), params_.kv_len - k0);
    prefetch_mask<T>(params_, head_.mask, rows.first, rows.count, k0, keys, prefetch);
  }

  // The weights of the keys in `seen`, and the running state with them; keys that a mask hides from all rows leave it.
  ATTN_INLINE MaskBlock weights(const QueryTile& rows, const RunningRows<Real>& running, Real* sums, int64_t k0,
                                TileKeys& seen, RowPrefetch& prefetch) {
    MaskBlock masked = MaskBlock::all_visible;
    const auto load = [&] {
      if ((params_.mask != MaskKind::none || params_.alibi) && !seen.empty())
        masked = load_bias<T, true>(params_, head_, rows.first, rows.count, k0, seen, products_.bias, tile);
      if (masked == MaskBlock::all_hidden) seen = {0, 0, 0, 0};
    };
    load();
    if (seen.empty()) return masked;
    for (int tries = 0;; tries++) {  // again if the reference moves, which it does once
      products_.weights(rows, running, seen, masked, prefetch);
      if (tries == 1 || !move_references(rows, running, sums)) break;
      if (Products::bias_is_overwritten && has_block(masked)) load();
    }
    products_.save_running(rows, running);
    return masked;
  }

  // Largest scores against the reference, in log2 units. Under ALiBi the first keys of a row are its farthest: their
  // maximum says nothing of what is to come, and references do not move down.
  static constexpr bool narrow = Products::narrow;
  static constexpr Real lowest_top = narrow ? Real(-4) : Real(-40), highest_top = narrow ? Real(9) : Real(60);
  static constexpr Real unseen = -Real(__builtin_inff());
  bool leaves_range(Real top, Real above) const {
    return above >= highest_top || (!params_.alibi && above <= lowest_top && top > unseen);
  }

  // Rows whose maximum left the range take it as their reference; what they hold is scaled. True if any moved.
  ATTN_INLINE bool move_references(const QueryTile& rows, const RunningRows<Real>& running, Real* sums) const {
    const Vec<Real> exponents = Vec<Real>::set(Real(unit_.exponents)), none = Vec<Real>::set(unseen);
    Vec<Real> high = none, low = Vec<Real>::zero();
    for (int64_t j = 0; j < rows.vectors_used; j++) {
      const Vec<Real> top = products_.top(j), above = (top + load(running.reference + j * width)) * exponents;
      high = max(above, high);  // a NaN is passed over
      low = min(select(eq(top, none), Vec<Real>::zero(), above), low);
    }
    if (!any(ge(high, Vec<Real>::set(highest_top))) && (params_.alibi || !any(ge(Vec<Real>::set(lowest_top), low))))
      return false;
    const int64_t ld = buffers_.output_ld;
    alignas(64) Real top[width], factor[width];
    bool moved = false;
    for (int64_t j = 0; j < rows.vectors_used; j++) {
      store(top, products_.top(j));
      for (int i = 0; i < width; i++) {
        Real& reference = running.reference[j * width + i];
        const Real above = (top[i] + reference) * Real(unit_.exponents);
        const bool out = leaves_range(top[i], above);
        // moved down: nothing of weight was kept so far, and 2^-above may be inf
        factor[i] = !out ? Real(1) : above < 0 ? Real(0) : Real(__builtin_exp2(-double(above)));
        if (!out) continue;
        moved = true;
        reference = -top[i];
        if (started_[rows.index]) Products::scale_row(sums, ld, j * width + i, factor[i]);
      }
      Real *const total = running.total + j * width, *const rounded = running.rounded + j * width;
      store(total, load(total) * load(factor));
      if constexpr (Products::rounds) store(rounded, load(rounded) * load(factor));
    }
    return moved;
  }

  // lse, what derivatives need, and what the sums over keys are divided by
  ATTN_INLINE void finish_rows(const QueryTile& rows, const RunningRows<Real>& running) {
    constexpr Real unit = Products::weight_unit;
    const Real keep = Real(params_.dropout.keep_scale);
    Real* const lse = static_cast<Real*>(head_.lse) + rows.first;
    RowStats<Real>* const stats = static_cast<RowStats<Real>*>(head_.stats) + rows.first;
    const auto sum_of = [&](Real reference, Real sum) {
      return head_.sink == -__builtin_inf() ? row_sum(reference, sum, unit_)
                                            : row_sum(head_.sink, reference, sum, unit_);
    };
    if constexpr (narrow) Products::round_totals(rows, running, float(unit_.exponents));
    for (int64_t i = 0; i < rows.count; i++) {
      const Real reference = -running.reference[i];
      if constexpr (Products::own_scores)
        if (!scores_repeat(running.top[i], unit_)) others_.add(rows.index * tile + i);
      const RowSum<Real> sum = sum_of(reference, running.total[i] * unit);
      lse[i] = sum.lse;
      stats[i] = sum.stats;
      buffers_.inverse[i] =
          (Products::rounds ? sum_of(reference, running.rounded[i] * unit).inverse : sum.inverse) * keep * unit;
    }
  }

  // Rows to be computed again keep their next reference in running.top: those that ended below the range, and those far
  // from their reference whose weighted values were so small that they were not normal numbers, get their largest
  // score; those whose output is not finite one so far above it that no sum of weighted values is larger than the
  // largest, but of float16 weights and values all sums are finite.
  ATTN_INLINE void look_again(const QueryTile& rows, const RunningRows<Real>& running, const T* out) {
    constexpr Real far = Real(8);
    const bool finite = narrow || all_finite(out, params_.out_row, rows.count, params_.v_head_dim);
    for (int64_t i = 0; i < rows.count; i++) {
      const Real top = running.top[i], above = (top + running.reference[i]) * Real(unit_.exponents);
      const T* const row = out + i * params_.out_row;
      const bool below = above <= lowest_top, row_finite = finite || all_finite(row, 0, 1, params_.v_head_dim);
      if (!(top > unseen) || (row_finite && !below && (above >= -far || is_normal(row, buffers_.inverse[i])))) {
        running.top[i] = unseen;
        continue;
      }
      settled_ = false;
      if (!row_finite) running.top[i] += headroom() / Real(unit_.exponents);
    }
    for (int64_t i = rows.count; i < tile; i++) running.top[i] = unseen;
  }
  ATTN_NOINLINE bool is_normal(const T* out, Real inverse) const {
    constexpr Real least = sizeof(Real) == 4 ? Real(0x1p-100f) : Real(0x1p-960);
    Real largest = 0;
    for (int64_t d = 0; d < params_.v_head_dim; d++) {
      const Real x = load_one(out + d), size = x < 0 ? -x : x;
      largest = size > largest ? size : largest;
    }
    return largest >= least * inverse;
  }
  // log2 of the number of keys, and of the unit in which weights are counted
  Real headroom() const {
    Real bits = Products::weight_unit < 1 ? 7 : 0;
    for (int64_t n = params_.kv_len; n > 1; n = (n + 1) / 2) bits += 1;
    return bits;
  }

  const AttentionParams& params_;
  const HeadPointers& head_;
  const int64_t first_, count_;
  const bool again_;  // the second pass
  const ScoreUnit unit_;
  const Buffers buffers_;
  const OtherRows others_;
  Products products_;
  bool started_[tiles];  // whether a tile's sums hold anything
  bool settled_ = true;  // no row is to be computed again
};

}  // namespace
}  // namespace attnjourney
