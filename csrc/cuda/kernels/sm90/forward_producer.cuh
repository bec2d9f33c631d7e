// The producer thread of the Hopper forward: decodes tiles and feeds Q, K and V by TMA.
#pragma once
#include "forward_shape.cuh"

namespace attnjourney {

// The copies of one block: what Sm90ForwardProducer and Sm90FullProducer share.
template <class S>
struct Sm90ForwardLoads {
  const uint32_t smem;
  const Sm90ForwardBarriers<S>& b;
  const Sm90ForwardMaps& maps;
  const ForwardTask& p;
  int k_count = 0;

  // 64 rows of Q; at: warpgroup * kQueryStages + stage
  __device__ __forceinline__ void load_q(int at, int head, int batch, int row) {
    ptx::mbarrier_arrive_expect_tx(b.q_full + 8 * at, S::kQueryBytes);
#pragma unroll
    for (int c = 0; c < S::kDqk / 64; c++)
      ptx::tma_load_4d(smem + at * S::kQueryBytes + c * 64 * 128, &maps.query, c * 64, head, row, batch,
                       b.q_full + 8 * at);
  }
  // the stage of the next K tile, free
  __device__ __forceinline__ int wait_k() {
    const int s = k_count % S::kStages;
    ptx::mbarrier_wait(b.k_empty + 8 * s, (k_count / S::kStages & 1) ^ 1);
    return s;
  }
  __device__ __forceinline__ void load_k(int head, int batch, int row) { load_k(wait_k(), head, batch, row); }
  __device__ __forceinline__ void load_k(int s, int head, int batch, int row) {
    ptx::mbarrier_arrive_expect_tx(b.k_full + 8 * s, S::kKeyBytes);
#pragma unroll
    for (int c = 0; c < S::kDqk / 64; c++)
      ptx::tma_load_4d(smem + S::kKeyAt + s * S::kKeyBytes + c * S::kKeys * 128, &maps.key, c * 64, head, row, batch,
                       b.k_full + 8 * s);
    k_count++;
  }
  // count: V tiles before this one. They follow K's, whose number tells it. Rows from `end` on are zeros
  __device__ __forceinline__ void load_v(int count, int head, int batch, int row, int end) {
    const int s = count % S::kStages;
    ptx::mbarrier_wait(b.v_empty + 8 * s, (count / S::kStages & 1) ^ 1);
    ptx::mbarrier_arrive_expect_tx(b.v_full + 8 * s, S::kValueBytes);
    tma_load_rows<S::kKeys, S::kDv / 64>(smem + S::kValueAt + s * S::kValueBytes, maps.value, maps.value8, maps.value1,
                                         row, end, p.kv_len, head, batch, b.v_full + 8 * s);
  }

  // the tile of rows after tile i of all
  __device__ __forceinline__ int next_tile(int i) {
    return gridDim.x + (p.counter ? int(ptx::atomic_add(p.counter, 1)) : i);
  }
  // The last block to finish leaves the counter as it was found.
  __device__ __forceinline__ void finish() {
    if (p.counter && ptx::atomic_add(p.counter + 1, 1) == gridDim.x - 1) {
      ptx::atomic_add(p.counter, 0u - uint32_t(p.total));
      ptx::atomic_add(p.counter + 1, 0u - gridDim.x);
    }
  }
};

template <class S>
struct Sm90ForwardProducer : Sm90ForwardLoads<S> {
  using Slot = Sm90ForwardSlot;
  using Loads = Sm90ForwardLoads<S>;
  using Loads::b, Loads::p, Loads::k_count;
  Slot* const slots;

  __device__ __forceinline__ void load_k(int head, int batch, int n) { Loads::load_k(head, batch, n * S::kKeys); }
  __device__ __forceinline__ void load_v(int count, int head, int batch, int n, int end) {
    Loads::load_v(count, head, batch, n * S::kKeys, S::kRanged ? end : p.kv_len);
  }

  // tile i of all; i = p.total and more: none
  struct Decoded {
    bool more;
    ForwardTile t;
    Sequence sequence;
    KeyTiles tiles;
    __device__ __forceinline__ Decoded(const ForwardTask& p, int i)
        : more(i < p.total),
          t(more ? forward_tile<S::kRows, S::kRanged>(p, i) : ForwardTile{0, 0, 0}),
          sequence(sequence_of(p, t.batch)),
          tiles(key_tiles_of<S::kKeys, S::kRanged>(p, sequence, t.row, t.row + S::kRows - 1)) {}
  };

  // warpgroup w's part of a tile: its slot, and its rows of Q
  __device__ __forceinline__ void feed_group(int w, int round, int i) {
    const Decoded d(p, i);
    const auto& [more, t, sequence, tiles] = d;
    const int at = w * S::kQueryStages + round % S::kQueryStages;
    ptx::mbarrier_wait(b.q_empty + 8 * at, (round / S::kQueryStages & 1) ^ 1);
    const int row = t.row + 64 * w;
    const KeyTiles own = key_tiles_of<S::kKeys, S::kRanged>(p, sequence, row, row + 63);
    Slot& x = slots[w * 4 + round % 4];
    const int count = tiles.count();
    x.first = own.count() ? own.end - 1 : tiles.first();
    const int last =
        x.first >= tiles.begin ? x.first - tiles.begin + tiles.prefix : x.first;  // how many come before it
    x.start = !more ? -1 : count ? count - last : 0;
    x.tiles.begin = tiles.begin;
    x.tiles.prefix = tiles.prefix;
    x.tiles.whole_begin = own.whole_begin;
    x.tiles.whole_end = own.whole_end;
    x.row = t.row;
    x.head = t.head;
    x.batch = t.batch;
    x.q_len = sequence.q_len;
    x.key_length = sequence.keys.key_length;
    x.offset = sequence.keys.offset;
    x.key_end = tiles.key_end;
    x.last = tiles.end - 1;
    if (more && count) {
      Loads::load_q(at, t.head, t.batch, row);
    } else {
      ptx::mbarrier_arrive(b.q_full + 8 * at);
    }
  }

  __device__ __forceinline__ void run() {
    for (int i = blockIdx.x, round = 0;; round++) {
      const Decoded d(p, i);
      const auto& [more, t, sequence, tiles] = d;
      const bool some = more && tiles.count();
      const int head_k = t.head / p.group;
      if (some) load_k(head_k, t.batch, tiles.end - 1);
#pragma unroll(S::kGroups == 3 && S::kRanged ? 1 : S::kGroups)
      for (int w = 0; w < S::kGroups; w++) feed_group(w, round, i);
      const Slot& now = slots[round % 4];  // what was found out once is read there: registers are few
      if (const Slot& x = slots[(round + 3) % 4]; round > 0 && x.start > 0) {  // the last V tile of the round before
        load_v(k_count - (now.start > 0 ? 2 : 1), x.head / p.group, x.batch, x.tiles.prefix > 0 ? 0 : x.tiles.begin,
               x.key_end);
      }
      if (now.start < 0) break;
      i = Loads::next_tile(i);
      if (now.start > 0) {
        const int head = now.head / p.group, batch = now.batch, begin = now.tiles.begin, prefix = now.tiles.prefix;
        const auto below = [&](int n) { return n == begin ? prefix - 1 : n - 1; };
        int n = now.last;
        for (int next = below(n); next >= 0; n = next, next = below(n)) {
          load_k(head, batch, next);
          load_v(k_count - 2, head, batch, n, now.key_end);
        }
      }
    }
    Loads::finish();
  }
};

}  // namespace attnjourney
