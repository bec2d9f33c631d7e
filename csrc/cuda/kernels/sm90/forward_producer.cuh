// The producer thread of the Hopper forward: decodes tiles and feeds Q, K and V by TMA.
#pragma once
#include "forward_shape.cuh"

namespace attnjourney {

// The copies of one block: what Sm90ForwardProducer and Sm90FullProducer share.
template <class Shape>
struct Sm90ForwardLoads {
  const uint32_t smem;
  const Sm90ForwardBarriers<Shape>& barriers;
  const Sm90ForwardMaps& maps;
  const ForwardTask& task;
  int k_count = 0;

  // 64 rows of Q; at: warpgroup * kQueryStages + stage
  __device__ __forceinline__ void load_q(int at, int head, int batch, int row) {
    ptx::mbarrier_arrive_expect_tx(barriers.q_full + 8 * at, Shape::kQueryBytes);
#pragma unroll
    for (int c = 0; c < Shape::kDqk / 64; c++)
      ptx::tma_load_4d(smem + at * Shape::kQueryBytes + c * 64 * 128, &maps.query, c * 64, head, row, batch,
                       barriers.q_full + 8 * at);
  }
  // the stage of the next K tile, free
  __device__ __forceinline__ int wait_k() {
    const int stage = k_count % Shape::kStages;
    ptx::mbarrier_wait(barriers.k_empty + 8 * stage, (k_count / Shape::kStages & 1) ^ 1);
    return stage;
  }
  __device__ __forceinline__ void load_k(int head, int batch, int row) { load_k(wait_k(), head, batch, row); }
  __device__ __forceinline__ void load_k(int stage, int head, int batch, int row) {
    ptx::mbarrier_arrive_expect_tx(barriers.k_full + 8 * stage, Shape::kKeyBytes);
    load_panels<Shape::kDqk / 64>(smem + Shape::kKeyAt + stage * Shape::kKeyBytes, maps.key, head, batch, row,
                                  barriers.k_full + 8 * stage);
    k_count++;
  }
  // the stage of a V tile, free; count: V tiles before this one. They follow K's, so that K's number gives it
  __device__ __forceinline__ int wait_v(int count) {
    const int stage = count % Shape::kStages;
    ptx::mbarrier_wait(barriers.v_empty + 8 * stage, (count / Shape::kStages & 1) ^ 1);
    return stage;
  }
  // rows from `end` on are zeros
  __device__ __forceinline__ void load_v(int stage, int head, int batch, int row, int end) {
    ptx::mbarrier_arrive_expect_tx(barriers.v_full + 8 * stage, Shape::kValueBytes);
    const uint32_t to = smem + Shape::kValueAt + stage * Shape::kValueBytes;
    if constexpr (Shape::kCluster > 1)  // which is without ends
      load_panels<Shape::kDv / 64>(to, maps.value, head, batch, row, barriers.v_full + 8 * stage);
    else
      tma_load_rows<Shape::kKeys, Shape::kDv / 64>(to, maps.value, maps.value8, maps.value1, row, end, task.kv_len,
                                                   head, batch, barriers.v_full + 8 * stage);
  }
  // A tile of keys; in a cluster this block's rows of it, to all blocks. What the others bring may be here before this
  // block expects it: its phase ends with neither alone.
  template <int Panels>
  __device__ __forceinline__ void load_panels(uint32_t to, const ptx::TensorMap& map, int head, int batch, int row,
                                              uint32_t bar) {
    constexpr int kPart = Shape::kKeys / Shape::kCluster;
    const int first = Shape::kCluster == 1 ? 0 : blockIdx.x % Shape::kCluster * kPart;
#pragma unroll
    for (int c = 0; c < Panels; c++) {
      const uint32_t panel = to + (c * Shape::kKeys + first) * 128;
      if constexpr (Shape::kCluster == 1)
        ptx::tma_load_4d(panel, &map, c * 64, head, row, batch, bar);
      else
        ptx::tma_multicast_4d(panel, &map, c * 64, head, row + first, batch, bar, (1u << Shape::kCluster) - 1);
    }
  }
  // A block must not end while others may write to it, or arrive here: until all have released the last tiles.
  __device__ __forceinline__ void await_cluster() {
    for (int i = 0; i < Shape::kStages; i++, k_count++) {
      wait_k();
      wait_v(k_count);
    }
  }

  // the tile of rows after tile i of all
  __device__ __forceinline__ int next_tile(int i) {
    return gridDim.x + (task.counter ? int(ptx::atomic_add(task.counter, 1)) : i);
  }
  // The last block to finish leaves the counter as it was found.
  __device__ __forceinline__ void finish() {
    if (task.counter && ptx::atomic_add(task.counter + 1, 1) == gridDim.x - 1) {
      ptx::atomic_add(task.counter, 0u - uint32_t(task.total));
      ptx::atomic_add(task.counter + 1, 0u - gridDim.x);
    }
  }
};

template <class Shape>
struct Sm90ForwardProducer : Sm90ForwardLoads<Shape> {
  using Slot = Sm90ForwardSlot;
  using Loads = Sm90ForwardLoads<Shape>;
  using Loads::barriers, Loads::task, Loads::k_count;
  Slot* const slots;

  __device__ __forceinline__ void load_k(int head, int batch, int key_tile) {
    Loads::load_k(head, batch, key_tile * Shape::kKeys);
  }
  // round: whose tile this is
  __device__ __forceinline__ void load_v(int round, int count, int head, int batch, int key_tile, int end) {
    const int stage = Loads::wait_v(count);
    if constexpr (Shape::kScouts) {
      const int2 whole = whole_of(round);
      look(stage) = key_tile < whole.x || key_tile >= whole.y;
    }
    Loads::load_v(stage, head, batch, key_tile * Shape::kKeys, Shape::kRanged ? end : task.kv_len);
  }
  // what the scouts are told of a tile (forward_scouts.cuh)
  __device__ __forceinline__ int& look(int stage) {
    return reinterpret_cast<int4*>(reinterpret_cast<unsigned char*>(slots) + Shape::kFlagsAt - Shape::kSlotsAt)[stage]
        .x;
  }
  // the key tiles that hide nothing from any row of the block
  __device__ __forceinline__ int2& whole_of(int round) {
    return reinterpret_cast<int2*>(&look(Shape::kStages))[round % 4];
  }

  // tile i of all; i = task.total and more: none
  struct Decoded {
    bool more;
    ForwardTile t;
    Sequence sequence;
    KeyTiles tiles;
    __device__ __forceinline__ Decoded(const ForwardTask& task, int i)
        : more(i < task.total),
          t(more ? forward_tile<Shape::kRows, Shape::kRanged>(task, i) : ForwardTile{0, 0, 0}),
          sequence(sequence_of(task, t.batch)),
          tiles(key_tiles_of<Shape::kKeys, Shape::kRanged>(task, sequence, t.row, t.row + Shape::kRows - 1)) {}
  };

  // warpgroup w's part of a tile: its slot, and its rows of Q
  __device__ __forceinline__ void feed_group(int group, int round, int i) {
    const Decoded decoded(task, i);
    const auto& [more, t, sequence, tiles] = decoded;
    const int at = group * Shape::kQueryStages + round % Shape::kQueryStages;
    ptx::mbarrier_wait(barriers.q_empty + 8 * at, (round / Shape::kQueryStages & 1) ^ 1);
    const int row = t.row + 64 * group;
    const KeyTiles own = key_tiles_of<Shape::kKeys, Shape::kRanged>(task, sequence, row, row + 63);
    Slot& slot = slots[group * 4 + round % 4];
    const int count = tiles.count();
    slot.first = own.count() ? own.end - 1 : tiles.first();
    slot.start = !more ? -1 : count ? count - tiles.number(slot.first) : 0;
    slot.tiles.begin = tiles.begin;
    slot.tiles.prefix = tiles.prefix;
    slot.tiles.whole_begin = own.whole_begin;
    slot.tiles.whole_end = own.whole_end;
    slot.row = t.row;
    slot.head = t.head;
    slot.batch = t.batch;
    slot.q_len = sequence.q_len;
    slot.key_length = sequence.keys.key_length;
    slot.offset = sequence.keys.offset;
    slot.key_end = tiles.key_end;
    slot.last = tiles.end - 1;
    if (more && count) {
      Loads::load_q(at, t.head, t.batch, row);
    } else {
      ptx::mbarrier_arrive(barriers.q_full + 8 * at);
    }
  }

  __device__ __forceinline__ void run() {
    for (int i = blockIdx.x, round = 0;; round++) {
      const Decoded decoded(task, i);
      const auto& [more, t, sequence, tiles] = decoded;
      const bool some = more && tiles.count();
      const int head_k = t.head / task.group;
      if (some) load_k(head_k, t.batch, tiles.end - 1);
      if constexpr (Shape::kScouts) whole_of(round) = {tiles.whole_begin, tiles.whole_end};
#pragma unroll(Shape::kGroups == 3 && Shape::kRanged ? 1 : Shape::kGroups)
      for (int group = 0; group < Shape::kGroups; group++) feed_group(group, round, i);
      const Slot& now = slots[round % 4];  // what was found out once is read there: registers are few
      if (const Slot& slot = slots[(round + 3) % 4];
          round > 0 && slot.start > 0) {  // the last V tile of the round before
        load_v(round + 3, k_count - (now.start > 0 ? 2 : 1), slot.head / task.group, slot.batch,
               slot.tiles.prefix > 0 ? 0 : slot.tiles.begin, slot.key_end);
      }
      if (now.start < 0) break;
      i = Loads::next_tile(i);
      if (now.start > 0) {
        const int head = now.head / task.group, batch = now.batch, begin = now.tiles.begin, prefix = now.tiles.prefix;
        const auto below = [&](int key_tile) { return key_tile == begin ? prefix - 1 : key_tile - 1; };
        int key_tile = now.last;
        for (int next = below(key_tile); next >= 0; key_tile = next, next = below(key_tile)) {
          load_k(head, batch, next);
          load_v(round, k_count - 2, head, batch, key_tile, now.key_end);
        }
      }
    }
    Loads::finish();
    if constexpr (Shape::kCluster > 1) Loads::await_cluster();
    if constexpr (Shape::kScouts) {
      const int stage = Loads::wait_v(k_count);
      look(stage) = -1;
      ptx::mbarrier_arrive(barriers.v_full + 8 * stage);
    }
  }
};

}  // namespace attnjourney
