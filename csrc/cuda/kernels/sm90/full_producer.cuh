// The producer thread of the Hopper forward with options: as that without, past the tiles that the mask hides, and
// with sequences that begin anywhere in the tensors.
#pragma once
#include "forward_producer.cuh"
#include "full_shape.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90FullProducer : Sm90ForwardLoads<Shape> {
  using Slot = Sm90FullSlot;
  using Loads = Sm90ForwardLoads<Shape>;
  using Loads::barriers, Loads::task, Loads::k_count;
  Slot* const slots;
  Sm90FullTile* const stages;
  const TileKinds& kinds;
  const Sm90FullForwardMaps& all;

  static __device__ __forceinline__ int query_at(int group, int round) {
    return group * Shape::kQueryStages + round % Shape::kQueryStages;
  }
  // warpgroup w's slot of tile i of all, all but `start`, once it is free
  __device__ __forceinline__ void describe(int group, int round, int i) {
    ptx::mbarrier_wait(barriers.q_empty + 8 * query_at(group, round), (round / Shape::kQueryStages & 1) ^ 1);
    Slot& slot = slots[group * 4 + round % 4];
    const ForwardTile t = packed_tile<Shape::kRows>(task, i);
    const Sequence sequence = sequence_of<true>(task, t.batch);
    const KeyTiles tiles = key_tiles_of<Shape::kKeys, true>(task, sequence, t.row, t.row + Shape::kRows - 1);
    slot.first = tiles.end - 1, slot.block_begin = tiles.begin, slot.block_prefix = tiles.prefix;
    slot.key_end = sequence.k_begin + tiles.key_end, slot.k_begin = sequence.k_begin;
    const int row = t.row + 64 * group;
    const KeyTiles own = key_tiles_of<Shape::kKeys, true>(task, sequence, row, row + 63);
    slot.tiles.begin = own.begin, slot.tiles.prefix = own.prefix, slot.last = own.end - 1;
    slot.tiles.whole_begin = own.whole_begin, slot.tiles.whole_end = own.whole_end;
    slot.row = t.row, slot.head = t.head, slot.batch = t.batch;
    slot.q_len = sequence.q_len, slot.key_length = sequence.keys.key_length, slot.offset = sequence.keys.offset;
    slot.rows = sequence.rows, slot.q_begin = sequence.q_begin;
    *reinterpret_cast<HeadScores*>(slot.scores_) = HeadScores(task, task.q_heads, t.batch, t.head);
    slot.kinds = kinds.bits ? kinds.of(task.scores, t.batch, t.head, row / 64) : nullptr;
  }

  // the first of the tiles n, n - 1, ... that some row sees, or less than 0
  static __device__ __forceinline__ int seen_from(int key_tile, const Slot& first, const Slot& second) {
#pragma unroll 1
    while (key_tile >= 0) {
      if (key_tile < first.block_begin && key_tile >= first.block_prefix) {
        key_tile = first.block_prefix - 1;
        continue;
      }
      if (first.kind(key_tile) != TileKind::hidden || second.kind(key_tile) != TileKind::hidden) return key_tile;
      const uint32_t upto = ~0u >> (31 - key_tile % 32);  // of this word
      const bool none = first.kinds && !((first.kinds[key_tile / 32].x | second.kinds[key_tile / 32].x) & upto);
      key_tile = (none ? key_tile & ~31 : key_tile) - 1;
    }
    return key_tile;
  }

  // of the K tile that was just asked for
  __device__ __forceinline__ void load_mask(const Slot& slot, int key_tile) {
    constexpr int kParts = Shape::kMaskParts;
    const int rows = task.scores.mask_row ? Shape::kRows : 1;
#pragma unroll 1
    for (int i = 0; i < kParts; i++) {
      const Sm90FullMaskPart<Shape> part(Loads::smem, (k_count - 1) * kParts + i);
      ptx::mbarrier_wait(part.empty, part.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(part.full, Shape::kMaskPanels * rows * 128);
#pragma unroll
      for (int c = 0; c < Shape::kMaskPanels; c++)
        ptx::tma_load_4d(part.at + c * Shape::kMaskPanel, &all.mask, (key_tile * kParts + i) * Shape::kKeys + c * 64,
                         task.scores.mask_head ? slot.head : 0, rows > 1 ? slot.row : 0,
                         all.mask_batched ? slot.batch : 0, part.full);
    }
  }

  __device__ __forceinline__ void run() {
    for (int i = blockIdx.x, round = 0;; round++) {
      const bool more = i < task.total;
#pragma unroll 1
      for (int group = 0; group < Shape::kGroups; group++) describe(group, round, more ? i : 0);
      Slot &first = slots[round % 4], &second = slots[4 + round % 4];
      int key_tile = more ? seen_from(first.first, first, second) : -1;
      const int item = task.cu_q ? 0 : first.batch;  // packed sequences lie in one
      first.start = second.start = !more ? -1 : key_tile >= 0;
#pragma unroll 1
      for (int group = 0; group < Shape::kGroups; group++) {
        if (key_tile >= 0)
          Loads::load_q(query_at(group, round), first.head, item, first.q_begin + first.row + 64 * group);
        else
          ptx::mbarrier_arrive(barriers.q_full + 8 * query_at(group, round));
      }
      if (!more) break;
      i = Loads::next_tile(i);
      const int head = first.head / task.group;
      for (int before = -1, next; key_tile >= 0;
           before = key_tile, key_tile = next) {  // a tile's V follows the K of the next one
        next = seen_from(key_tile - 1, first, second);
        const int stage = Loads::wait_k();
        stages[stage] = {key_tile, Sm90FullTile::pack(first.kind(key_tile), second.kind(key_tile), next < 0)};
        Loads::load_k(stage, head, item, first.k_begin + key_tile * Shape::kKeys);
        if constexpr (Shape::kBias)
          if (all.mask_tiles) load_mask(first, key_tile);
        if (before >= 0)
          Loads::load_v(Loads::wait_v(k_count - 2), head, item, first.k_begin + before * Shape::kKeys, first.key_end);
        if (next < 0)
          Loads::load_v(Loads::wait_v(k_count - 1), head, item, first.k_begin + key_tile * Shape::kKeys, first.key_end);
      }
    }
    Loads::finish();
  }
};

}  // namespace attnjourney
