// Which tile of scores the kernels on mma.sync work on next, and which of its scores a thread's rows see. Tiles in
// which a boolean mask or one of blocks hides all are left out.
#pragma once
#include "backward_task.cuh"
#include "scores.cuh"

namespace attnjourney {

// Tiles are numbers of a walk:
//   end(), after(n)      past the last one; the one after tile n
//   kind(n)              what a mask of blocks leaves of any tile
//   go(n, to)            from tile n to a later one, past tiles without a block; returns its number
//   leave(n)             past tile n, in which a boolean mask hides all
//   place(n, sequence)   TilePlace
//   sequence()           of the batch item
//   scores()             of the head of the tile to come
//   lane()
struct TilePlace {
  int row, key;  // of the thread's element 0
  bool whole;    // the key ranges hide nothing from the rows it looks at
};

// What next_visible_tile finds.
struct VisibleTile {
  uint32_t seen = 0;   // which of its scores a thread's rows see
  bool hides = false;  // may the mask or the key ranges hide any?
};

// The first of the tiles n, after(n), ... that is not left out, or the end. Fragment: of scores; flags: as block_any
// takes them. All threads of the block.
template <class Fragment, int Warps, class Real, class Walk, class Window>
__device__ __forceinline__ int next_visible_tile(int n, VisibleTile& found, const ScoresOf<Real>& options, Walk&& walk,
                                                 Window& window, uint32_t* flags, int& flags_turn, Fragment f = {}) {
  const bool blocks = options.mask_kind == MaskElement::blocks;
  const Sequence sequence = walk.sequence();
  for (; n < walk.end(); n = walk.after(n)) {
    if (blocks) {
      n = walk.go(n, window.next(n, walk.end(), [&](int i) { return walk.kind(i); }));
      if (n >= walk.end()) break;
    }
    const TilePlace place = walk.place(n, sequence);
    found.seen = place.whole ? kAllSeen<Fragment> : seen_in_range(sequence, place.row, place.key, f);
    const bool some_blocks = blocks && !window.whole(n);
    found.hides = !place.whole || some_blocks || options.mask_kind >= MaskElement::boolean;
    if (some_blocks)
      found.seen = seen_in_blocks(walk.scores().blocks(options), place.row, place.key, walk.lane(), found.seen, f);
    if (options.mask_kind != MaskElement::boolean) break;
    found.seen = seen_in_mask(options, walk.scores(), place.row, place.key, found.seen, f);
    if (block_any(found.seen != 0, flags, flags_turn, Warps)) break;
    walk.leave(n);
  }
  return n;
}

// The same where there is no mask: tile n itself.
template <class Fragment, class Walk>
__device__ __forceinline__ uint32_t seen_in_tile(int n, Walk&& walk) {
  const TilePlace place = walk.place(n, walk.sequence());
  return place.whole ? kAllSeen<Fragment> : seen_in_range<Fragment>(walk.sequence(), place.row, place.key);
}

// The query tiles of a backward block, of all the query heads of its key head. Kernel: kRows, kKeys, kOptions,
// takes_turns(p), and kRecompute: a sequence for the turns is recomputed, where holding it would spill.
template <class Kernel, bool Ranged, class Real>
struct QueryTileWalk {
  static constexpr int kRows = Kernel::kRows, kKeys = Kernel::kKeys;
  const BackwardTaskOf<Real>& p;
  const BackwardTile where;
  const Sequence held;
  BackwardQueries<kRows, kKeys, Ranged> at;  // the tile to come
  const int first_key, total;                // total: tiles

  __device__ __forceinline__ QueryTileWalk(const BackwardTaskOf<Real>& p_, unsigned block)
      : p(p_),
        where(Kernel::kOptions && p.cu_q ? BackwardTile(p, block, kKeys) : BackwardTile(p, block)),
        held(sequence_of<Kernel::kOptions>(p, where.batch)),
        at(p, where, held),
        first_key(where.key_tile * kKeys),
        total(at.per_head() * where.heads) {}

  __device__ __forceinline__ Sequence turn_sequence() const {
    return Kernel::kRecompute ? sequence_of<Kernel::kOptions>(p, where.batch) : held;
  }
  __device__ __forceinline__ int64_t scratch_of(int head) const {
    return Kernel::kOptions ? scratch_row(p, where.batch, head) : (int64_t(where.batch) * p.q_heads + head) * p.rows;
  }
  // A tile that is left out: others may wait for this block's turn.
  __device__ __forceinline__ void pass_turn() const {
    if (threadIdx.x != 0) return;
    int* turn = p.turn + 2 * (scratch_of(at.head) / kRows + at.tile);
    const int mine = at.turn(p, where, turn_sequence());
    ptx::turn_wait(turn, mine);
    ptx::turn_pass(turn, mine + 1);
  }

  __device__ __forceinline__ HeadScoresOf<Real> scores() const {
    return HeadScoresOf<Real>(p, p.q_heads, where.batch, at.head);
  }
  __device__ __forceinline__ int end() const { return total; }
  __device__ __forceinline__ int after(int n) {
    at.next();
    return n + 1;
  }
  __device__ __forceinline__ void leave(int) const {
    if (Kernel::takes_turns(p)) pass_turn();
  }
  __device__ __forceinline__ int go(int n, int to) {
    if (Kernel::takes_turns(p))
      for (; n < to; n++, at.next()) pass_turn();
    else if (to > n)
      at.go(to, where.first_head);
    return to;
  }
  __device__ __forceinline__ TileKind kind(int n) const {
    auto other = at;
    other.go(n, where.first_head);
    const HeadScoresOf<Real> scores(p, p.q_heads, where.batch, other.head);
    return scores.blocks(p.scores).kind(other.tile * kRows, kRows, first_key, min(kKeys, p.kv_len - first_key));
  }
};

// The key tiles of a block of Rows query rows; 16 rows a warp.
template <int Rows, int Keys, class Real>
struct KeyTileWalk {
  const SequenceTaskOf<Real>& p;
  const Sequence& sequence_;
  const HeadScoresOf<Real>& scores_;
  const KeyTiles &tiles, &own;  // that the block's rows see, that the warp's do
  int block_row, row;           // the block's first one, the thread's
  __device__ __forceinline__ int lane() const {
    return Keys == 8 ? ptx::opaque(threadIdx.x % 32) : threadIdx.x % 32;  // where the other way takes more registers
  }
  __device__ __forceinline__ const Sequence& sequence() const { return sequence_; }
  __device__ __forceinline__ const HeadScoresOf<Real>& scores() const { return scores_; }
  __device__ __forceinline__ int end() const { return tiles.end; }
  __device__ __forceinline__ int after(int n) const { return tiles.above(n); }
  __device__ __forceinline__ int go(int, int to) const { return to; }
  __device__ __forceinline__ void leave(int) const {}
  __device__ __forceinline__ TileKind kind(int n) const {
    if (n >= tiles.prefix && n < tiles.begin) return TileKind::hidden;
    return scores_.blocks(p.scores).kind(block_row, Rows, n * Keys, min(Keys, p.kv_len - n * Keys));
  }
  __device__ __forceinline__ TilePlace place(int n, const Sequence& sequence) const {
    const int warp_row = row - lane() / 4;
    return {row, n * Keys + lane() % 4 * 2, own.whole(n) && warp_row + 16 <= sequence.rows};
  }
};

}  // namespace attnjourney
