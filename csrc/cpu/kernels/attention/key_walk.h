// The keys that rows see, a step at a time.
#pragma once
#include "cpu/kernels/common/mask_tile.h"

namespace attnjourney {
namespace {

// tile_keys with, beside the key ranges, a mask of blocks: [begin, end) then begins and ends with keys of a block that
// some row sees any of.
ATTN_NOINLINE TileKeys within_blocks(const BlockRows& b, int64_t first, int64_t last, int64_t k0, TileKeys t) {
  const int64_t from = next_block_key(b, first, last, k0 + t.begin, k0 + t.end) - k0;
  const int64_t to = block_keys_end(b, first, last, k0 + from, k0 + t.end) - k0;
  if (from >= to) return {0, 0, 0, 0};
  t.begin = from;
  t.end = to;
  t.all_begin = max_of(t.all_begin, from);
  t.all_end = min_of(t.all_end, to);
  if (t.all_begin >= t.all_end) t.all_begin = t.all_end = to;
  return t;
}
// Borders moved so that what every row sees are whole groups of keys, as causal borders then are.
ATTN_INLINE TileKeys in_groups(TileKeys t) {
  constexpr int64_t rows = Tuning::rows;
  if (t.all_begin > t.begin) t.all_begin = min_of(t.all_end, t.begin + round_up(t.all_begin - t.begin, rows));
  if (t.all_end < t.end) t.all_end -= (t.all_end - t.all_begin) % rows;
  if (t.all_begin >= t.all_end) t.all_begin = t.all_end = t.end;
  return t;
}
ATTN_INLINE TileKeys seen_keys(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t last, int64_t k0,
                               int64_t n) {
  TileKeys t = tile_keys(p.keys, first, last, k0, n);
  if (p.mask == MaskKind::blocks && !t.empty())
    t = within_blocks(*static_cast<const BlockRows*>(h.mask), first, last, k0, t);
  return in_groups(t);
}

// The keys [k0, k0 + block) of every step for rows first .. first + count - 1, at most `most`, in order; k0 and `most`
// are multiples of 8. There is at least one step, perhaps of no key. Steps that no row sees are left out; with a mask
// of blocks, a step's blocks lie side by side, and where the rows lie in one row of blocks, all of them have elements
// or none has.
class KeyWalk {
 public:
  int64_t k0, block;

  ATTN_INLINE KeyWalk(const AttentionParams& p, const HeadPointers& h, int64_t first, int64_t count, int64_t most)
      : p_(p), first_(first), last_(first + count - 1), most_(most) {
    const TileKeys whole = tile_keys(p.keys, first_, last_, 0, p.keys.key_length);
    end_ = whole.end;
    if (p.mask == MaskKind::blocks) {
      blocks_ = static_cast<const BlockRows*>(h.mask);
      following_ = find(whole.begin / 16 * 16);
      take();
      return;
    }
    k0 = begin_ = whole.empty() ? 0 : whole.begin / most * most;
    block = max_of(0, min_of(most, end_ - k0));
  }

  ATTN_INLINE bool next() {
    if (blocks_) return following_.n > 0 && (take(), true);
    do {
      k0 += most_;
      if (k0 >= end_) return false;
      block = min_of(most_, end_ - k0);
    } while (tile_keys(p_.keys, first_, last_, k0, block).empty());  // between the prefix and the window
    return true;
  }

  // whether rows [first, last] see no key after this step, and did not already see none after the one before
  ATTN_INLINE bool last(int64_t first, int64_t last) const {
    if (blocks_) return following_.n == 0;
    const int64_t end = tile_keys(p_.keys, first, last, 0, p_.keys.key_length).end;
    return k0 + most_ >= end && (k0 < end || k0 == begin_);
  }

 private:
  struct Step {
    int64_t k0, n;
  };
  ATTN_NOINLINE void take() {
    k0 = following_.k0;
    block = following_.n;
    following_ = find(k0 + block);
  }
  Step find(int64_t from) const {
    const BlockRows& b = *blocks_;
    const bool one = first_ / b.size == last_ / b.size;
    for (int64_t k; (k = next_block_key(b, first_, last_, from, end_)) < end_;) {
      int64_t n = (k / b.size + 1) * b.size - k;
      while (n < most_ && k + n < end_ && next_block_key(b, first_, last_, k + n, end_) == k + n &&
             (!one || is_partial(b, first_, k) == is_partial(b, first_, k + n)))
        n += b.size;
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
