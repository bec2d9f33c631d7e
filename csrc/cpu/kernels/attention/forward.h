// Attention forward: online softmax over key blocks (Dao et al. 2022, arXiv 2205.14135; Rabe and Staats 2021,
// arXiv 2112.05682), O(len) memory.
//
// The walk over query tiles and key blocks, the running state of the rows and what becomes of it stand here. Scores,
// weights and their products with values come from Products: attention/plain_products.h in the precision of the
// arithmetic, attention/pair_products.h by pairs of bfloat16 numbers, attention/matrix_products.h on a matrix unit.
//
// exp2 is applied on the accumulators against a reference that starts at 0 and moves, with that block redone, only when
// a row's maximum leaves (-40, 60): no pass for the maximum, no rescaling per block.
#pragma once
#include "attention/params.h"
#include "cpu/kernels/common/log_sum.h"
#include "cpu/kernels/common/pack.h"
#include "cpu/kernels/common/scratch.h"
#include "forward_tile.h"
#include "key_walk.h"

namespace attnjourney {
namespace {

// Products: made of (params, head, buffers) for one call. P: the weights, kept in its buffers.
//   Buffers(params, tiles, scratch)
//   tile, key_block             queries, keys
//   Out, writes_rows(params)    rows of out that it can write in place of sums, and whether it does
//   rounds, weight_unit         products with values take rounded weights; what P is counted in
//   pack_query(tile)            Q^T
//   load_block(k0, keys)        a key block, to which all that follows refers
//   whole_units(seen)           keys that it can take without taking others
//   bias, bias_is_overwritten   [key][tile]: what is added to the scores, read by `weights` or replaced by P
//   weights(tile, running, seen, masked, prefetch)   P of the keys seen
//   top(j)                      the maximum of vector j of the tile, relative to its reference
//   save_running(tile, running) the running state after that
//   drop(tile, seen)            dropout on P
//   reaches_past(seen)          whether products with values take in keys that no row sees
//   values_finite()             whether every value of the block is
//   add_values(tile, seen, output, prefetch), add_values_guarded(tile, seen, output)
template <class T, class Products>
class Forward {
 public:
  using Real = Compute<T>;
  static constexpr int width = Vec<Real>::width;
  static constexpr int64_t tile = Products::tile, key_block = Products::key_block;
  static constexpr int64_t tiles = Tuning::forward_tiles;  // that share a key block

  static int64_t space(const AttentionParams& params, int64_t rows) { return scratch_bytes<Buffers>(params, rows); }

  // Rows first .. first + count - 1 (count <= tiles * tile) of one head.
  static void run(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t count, void* space) {
    if (params.alibi && Forward(params, head, first, count, true, space).pass()) return;
    Forward(params, head, first, count, false, space).pass();
  }

 private:
  struct Buffers {
    int64_t tiles_used, output_ld;
    typename Products::Buffers products;
    Real* output;               // [tiles][tile][output_ld]
    RunningRows<Real> running;  // [tiles][tile]
    Real* inverse;              // [tile]
    Buffers(const AttentionParams& params, int64_t rows, Scratch& scratch)
        : tiles_used((rows + tile - 1) / tile),
          output_ld(round_up(params.v_head_dim, 64 / int64_t(sizeof(Real)))),
          products(params, tiles_used, scratch),
          output(scratch.take<Real>(tiles_used * tile * output_ld)) {
      const int64_t n = tiles_used * tile;
      running = {scratch.take<Real>(n), scratch.take<Real>(n), scratch.take<Real>(n), nullptr};
      running.rounded = Products::rounds ? scratch.take<Real>(n) : running.total;
      inverse = scratch.take<Real>(tile);
    }
  };

  Forward(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t count, bool rising,
          void* space)
      : params_(params),
        head_(head),
        first_(first),
        count_(count),
        rising_(rising),
        buffers_(buffers_in<Buffers>(space, params, count)),
        products_(params, head, buffers_.products) {}

  // False if a row ended below the range.
  ATTN_NOINLINE bool pass() {
    for (int64_t t = 0; t < buffers_.tiles_used; t++) {
      products_.pack_query(tile_at(t));
      const RunningRows<Real> running = buffers_.running.of_tile(t * tile);
      for (int64_t i = 0; i < tile; i++) {
        running.reference[i] = running.total[i] = running.rounded[i] = Real(0);
        running.top[i] = -Real(__builtin_inff());
      }
      started_[t] = false;
    }
    KeyWalk walk(params_, head_, first_, count_, key_block);
    do {
      products_.load_block(walk.k0, walk.block);
      for (int64_t t = 0; t < buffers_.tiles_used; t++) step(walk, tile_at(t));
    } while (walk.next());
    return settled_;
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
    if (last && !direct)
      for (int64_t i = 0; i < rows.count; i++)
        unpack_rows<T>(sums + i * output.ld, output.ld, 1, params_.v_head_dim, output.inverse[i],
                       out + i * params_.out_row, params_.out_row);
  }

  // the mask of the step after this one
  ATTN_INLINE void prefetch_next(const KeyWalk& walk, int64_t next, RowPrefetch& prefetch) const {
    const bool same_keys = next < buffers_.tiles_used;
    const QueryTile rows = tile_at(same_keys ? next : 0);
    const int64_t k0 = same_keys ? walk.k0 : walk.k0 + walk.block;
    const int64_t keys = same_keys ? walk.block : min_of(key_block, params_.kv_len - k0);
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
    for (int tries = 0;; tries++) {  // again if the reference moves; bounded, for a NaN never settles
      products_.weights(rows, running, seen, masked, prefetch);
      if (tries == 2 || !move_references(rows, running, sums)) break;
      if (Products::bias_is_overwritten && has_block(masked)) load();
    }
    products_.save_running(rows, running);
    return masked;
  }

  // Under ALiBi the first keys of a row are its farthest: their maximum says nothing of what is to come. References
  // then do not move down (`rising`), and if a row ends below the range, all are computed again.
  static constexpr Real lowest_top = Real(-40), highest_top = Real(60);
  static constexpr Real no_visible_key = MaskValue<Real>::lowest * Real(1.9);  // below: none so far
  static ATTN_INLINE bool below_range(Real top) { return top <= lowest_top && top >= no_visible_key; }

  // Rows whose maximum left the range take it as their reference; what they hold is scaled. True if any moved.
  ATTN_INLINE bool move_references(const QueryTile& rows, const RunningRows<Real>& running, Real* sums) const {
    Vec<Real> high = Vec<Real>::set(Real(-1e30)), low = Vec<Real>::set(Real(1e30));
    const Vec<Real> none = Vec<Real>::set(no_visible_key);
    for (int64_t j = 0; j < rows.vectors_used; j++) {
      const Vec<Real> top = products_.top(j);
      high = max(high, top);
      low = min(low, select(ge(top, none), top, Vec<Real>::zero()));
    }
    if (!any(ge(high, Vec<Real>::set(highest_top))) && (rising_ || !any(ge(Vec<Real>::set(lowest_top), low))))
      return false;
    const int64_t ld = buffers_.output_ld;
    alignas(64) Real top[width], factor[width];
    for (int64_t j = 0; j < rows.vectors_used; j++) {
      store(top, products_.top(j));
      for (int i = 0; i < width; i++) {
        const bool out = top[i] >= highest_top || (!rising_ && below_range(top[i]));
        const Real move = out ? top[i] : Real(0);
        running.reference[j * width + i] -= move;
        // moved down: nothing of weight was kept so far, and 2^-move may be inf
        factor[i] = move < 0 ? Real(0) : Real(__builtin_exp2(-double(move)));
        if (out && started_[rows.index])
          for (int64_t d = 0; d < ld; d++) sums[(j * width + i) * ld + d] *= factor[i];
      }
      Real *const total = running.total + j * width, *const rounded = running.rounded + j * width;
      store(total, load(total) * load(factor));
      if constexpr (Products::rounds) store(rounded, load(rounded) * load(factor));
    }
    return true;
  }

  // lse, and what the sums over keys are divided by
  ATTN_INLINE void finish_rows(const QueryTile& rows, const RunningRows<Real>& running) {
    constexpr Real unit = Products::weight_unit;
    const Real keep = Real(params_.dropout.keep_scale);
    Real* const lse = static_cast<Real*>(head_.lse) + rows.first;
    for (int64_t i = 0; i < rows.count; i++) {
      const Real total = running.total[i] * unit, divisor = running.rounded[i] * unit,
                 reference = -running.reference[i];
      settled_ = settled_ && !(rising_ && below_range(running.top[i] + running.reference[i]));
      Real inverse = divisor == Real(0) ? Real(0) : keep / divisor;  // 0: the row sees no key
      lse[i] = natural_lse(reference, total);
      if (head_.sink != -__builtin_inf()) {
        add_sink(head_.sink, reference, divisor, inverse, lse[i]);
        Real unused = 0;
        if constexpr (Products::rounds) add_sink(head_.sink, reference, total, unused, lse[i]);
        if (divisor != Real(0)) inverse *= keep;
      }
      buffers_.inverse[i] = inverse * unit;
    }
  }

  const AttentionParams& params_;
  const HeadPointers& head_;
  const int64_t first_, count_;
  const bool rising_;
  const Buffers buffers_;
  Products products_;
  bool started_[tiles];  // whether a tile's sums hold anything
  bool settled_ = true;
};

}  // namespace
}  // namespace attnjourney
