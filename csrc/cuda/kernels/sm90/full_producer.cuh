// The producer thread of the Hopper forward with options: as that without, past the tiles that the mask hides, and
// with sequences that begin anywhere in the tensors.
#pragma once
#include "forward_producer.cuh"
#include "full_shape.cuh"

namespace attnjourney {

template <class S>
struct Sm90FullProducer : Sm90ForwardLoads<S> {
  using Slot = Sm90FullSlot;
  using Loads = Sm90ForwardLoads<S>;
  using Loads::b, Loads::p, Loads::k_count;
  Slot* const slots;
  Sm90FullTile* const stages;
  const TileKinds& kinds;

  static __device__ __forceinline__ int query_at(int w, int round) {
    return w * S::kQueryStages + round % S::kQueryStages;
  }
  // warpgroup w's slot of tile i of all, all but `start`, once it is free
  __device__ __forceinline__ void describe(int w, int round, int i) {
    ptx::mbarrier_wait(b.q_empty + 8 * query_at(w, round), (round / S::kQueryStages & 1) ^ 1);
    Slot& x = slots[w * 4 + round % 4];
    const ForwardTile t = packed_tile<S::kRows>(p, i);
    const Sequence sequence = sequence_of<true>(p, t.batch);
    const KeyTiles tiles = key_tiles_of<S::kKeys, true>(p, sequence, t.row, t.row + S::kRows - 1);
    x.first = tiles.end - 1, x.block_begin = tiles.begin, x.block_prefix = tiles.prefix;
    x.key_end = sequence.k_begin + tiles.key_end, x.k_begin = sequence.k_begin;
    const int row = t.row + 64 * w;
    const KeyTiles own = key_tiles_of<S::kKeys, true>(p, sequence, row, row + 63);
    x.tiles.begin = own.begin, x.tiles.prefix = own.prefix, x.last = own.end - 1;
    x.tiles.whole_begin = own.whole_begin, x.tiles.whole_end = own.whole_end;
    x.row = t.row, x.head = t.head, x.batch = t.batch;
    x.q_len = sequence.q_len, x.key_length = sequence.keys.key_length, x.offset = sequence.keys.offset;
    x.rows = sequence.rows, x.q_begin = sequence.q_begin;
    *reinterpret_cast<HeadScores*>(x.scores_) = HeadScores(p, p.q_heads, t.batch, t.head);
    x.kinds = kinds.bits ? kinds.of(p.scores, t.batch, t.head, row / 64) : nullptr;
  }

  // the first of the tiles n, n - 1, ... that some row sees, or less than 0
  static __device__ __forceinline__ int seen_from(int n, const Slot& first, const Slot& second) {
#pragma unroll 1
    while (n >= 0) {
      if (n < first.block_begin && n >= first.block_prefix) {
        n = first.block_prefix - 1;
        continue;
      }
      if (first.kind(n) != TileKind::hidden || second.kind(n) != TileKind::hidden) return n;
      const uint32_t upto = ~0u >> (31 - n % 32);  // of this word
      const bool none = first.kinds && !((first.kinds[n / 32].x | second.kinds[n / 32].x) & upto);
      n = (none ? n & ~31 : n) - 1;
    }
    return n;
  }

  __device__ __forceinline__ void run() {
    for (int i = blockIdx.x, round = 0;; round++) {
      const bool more = i < p.total;
#pragma unroll 1
      for (int w = 0; w < S::kGroups; w++) describe(w, round, more ? i : 0);
      Slot &first = slots[round % 4], &second = slots[4 + round % 4];
      int n = more ? seen_from(first.first, first, second) : -1;
      const int item = p.cu_q ? 0 : first.batch;  // packed sequences lie in one
      first.start = second.start = !more ? -1 : n >= 0;
#pragma unroll 1
      for (int w = 0; w < S::kGroups; w++) {
        if (n >= 0)
          Loads::load_q(query_at(w, round), first.head, item, first.q_begin + first.row + 64 * w);
        else
          ptx::mbarrier_arrive(b.q_full + 8 * query_at(w, round));
      }
      if (!more) break;
      i = Loads::next_tile(i);
      const int head = first.head / p.group;
      for (int before = -1, next; n >= 0; before = n, n = next) {  // a tile's V follows the K of the next one
        next = seen_from(n - 1, first, second);
        const int stage = Loads::wait_k();
        stages[stage] = {n, Sm90FullTile::pack(first.kind(n), second.kind(n), next < 0)};
        Loads::load_k(stage, head, item, first.k_begin + n * S::kKeys);
        if (before >= 0) Loads::load_v(k_count - 2, head, item, first.k_begin + before * S::kKeys, first.key_end);
        if (next < 0) Loads::load_v(k_count - 1, head, item, first.k_begin + n * S::kKeys, first.key_end);
      }
    }
    Loads::finish();
  }
};

}  // namespace attnjourney
