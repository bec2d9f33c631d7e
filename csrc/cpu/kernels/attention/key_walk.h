// The keys that rows see, a step at a time: all of them, or runs of visible blocks. The lists of a mask of blocks are
// sorted by key within each row of blocks, so that the backward asks them for every key step of its own walk and needs
// no transposed ones.
#pragma once
#include "cpu/kernels/common/mask_tile.h"

namespace attnjourney {
namespace {

// tile_keys with, besides the key ranges, a mask of blocks: [begin, end) then begins and ends with keys of a block that
// some row sees any of.
ATTN_NOINLINE TileKeys within_blocks(const BlockRows& blocks, int64_t first, int64_t last, int64_t k0, TileKeys seen) {
  const int64_t from = next_block_key(blocks, first, last, k0 + seen.begin, k0 + seen.end) - k0;
  const int64_t to = block_keys_end(blocks, first, last, k0 + from, k0 + seen.end) - k0;
  if (from >= to) return {0, 0, 0, 0};
  seen.begin = from;
  seen.end = to;
  seen.all_begin = max_of(seen.all_begin, from);
  seen.all_end = min_of(seen.all_end, to);
  if (seen.all_begin >= seen.all_end) seen.all_begin = seen.all_end = to;
  return seen;
}
// Borders moved so that what every row sees are whole groups of keys, as causal borders then are.
ATTN_INLINE TileKeys in_groups(TileKeys seen) {
  constexpr int64_t rows = Tuning::rows;
  if (seen.all_begin > seen.begin)
    seen.all_begin = min_of(seen.all_end, seen.begin + round_up(seen.all_begin - seen.begin, rows));
  if (seen.all_end < seen.end) seen.all_end -= (seen.all_end - seen.all_begin) % rows;
  if (seen.all_begin >= seen.all_end) seen.all_begin = seen.all_end = seen.end;
  return seen;
}
ATTN_INLINE TileKeys seen_keys(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t last,
                               int64_t k0, int64_t n) {
  TileKeys seen = tile_keys(params.keys, first, last, k0, n);
  if (params.mask == MaskKind::blocks && !seen.empty())
    seen = within_blocks(*static_cast<const BlockRows*>(head.mask), first, last, k0, seen);
  return in_groups(seen);
}

// The keys [k0, k0 + block) of every step for rows first .. first + count - 1, at most `most`, in order; k0 and `most`
// are multiples of 8. There is at least one step, perhaps of no key. Steps that no row sees are left out; with a mask
// of blocks, a step's blocks lie side by side, and where the rows lie in one row of blocks, all of them have elements
// or none has.
class KeyWalk {
 public:
  int64_t k0, block;

  ATTN_INLINE KeyWalk(const AttentionParams& params, const HeadPointers& head, int64_t first, int64_t count,
                      int64_t most)
      : p_(params), first_(first), last_(first + count - 1), most_(most) {
    const TileKeys whole = tile_keys(params.keys, first_, last_, 0, params.keys.key_length);
    end_ = whole.end;
    if (params.mask == MaskKind::blocks) {
      blocks_ = static_cast<const BlockRows*>(head.mask);
      following_ = find(whole.begin / 16 * 16);
      take();
      return;
    }
    k0 = begin_ = whole.empty() ? 0 : whole.begin / most * most;
    block = max_of(0, min_of(most, end_ - k0));
  }

  ATTN_INLINE bool next() {
    if (blocks_) {
      const bool more = following_.keys > 0;
      if (more) take();
      return more;
    }
    do {
      k0 += most_;
      if (k0 >= end_) return false;
      block = min_of(most_, end_ - k0);
    } while (tile_keys(p_.keys, first_, last_, k0, block).empty());  // between the prefix and the window
    return true;
  }

  // whether rows [first, last] see no key after this step, and did not already see none after the one before
  ATTN_INLINE bool last(int64_t first, int64_t last) const {
    if (blocks_) return following_.keys == 0;
    const int64_t end = tile_keys(p_.keys, first, last, 0, p_.keys.key_length).end;
    return k0 + most_ >= end && (k0 < end || k0 == begin_);
  }

 private:
  struct Step {
    int64_t k0, keys;
  };
  ATTN_NOINLINE void take() {
    k0 = following_.k0;
    block = following_.keys;
    following_ = find(k0 + block);
  }
  Step find(int64_t from) const {
    const BlockRows& blocks = *blocks_;
    const bool one = first_ / blocks.size == last_ / blocks.size;
    for (int64_t k; (k = next_block_key(blocks, first_, last_, from, end_)) < end_;) {
      int64_t n = (k / blocks.size + 1) * blocks.size - k;
      while (n < most_ && k + n < end_ && next_block_key(blocks, first_, last_, k + n, end_) == k + n &&
             (!one || is_partial(blocks, first_, k) == is_partial(blocks, first_, k + n)))
        n += blocks.size;
      n = min_of(min_of(n, most_), end_ - k);
      if (!tile_keys(p_.keys, first_, last_, k, n).empty()) return {k, n};
      from = k + n;
    }
    return {min_of(from, end_), 0};
  }

  const AttentionParams& p_;
  const BlockRows* blocks_ = nullptr;
  int64_t first_, last_, most_, begin_ = 0, end_ = 0;
  Step following_{0, 0};
};

}  // namespace
}  // namespace attnjourney
