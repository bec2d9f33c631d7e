// The producer thread of the Hopper forward: decodes tiles and feeds Q, K and V by TMA.
#pragma once
#include "sm90_forward_shape.cuh"

namespace attnjourney {

template <class S>
struct Sm90ForwardProducer {
  using Slot = Sm90ForwardSlot;
  const uint32_t smem;
  const Sm90ForwardBarriers<S>& b;
  Slot* const slots;
  const Sm90ForwardMaps& maps;
  const ForwardTask& p;
  int k_count = 0, v_count = 0;

  __device__ __forceinline__ void load_k(int head, int batch, int n) {
    const int s = k_count % S::kStages;
    ptx::mbarrier_wait(b.k_empty + 8 * s, (k_count / S::kStages & 1) ^ 1);
    ptx::mbarrier_arrive_expect_tx(b.k_full + 8 * s, S::kKeyBytes);
#pragma unroll
    for (int c = 0; c < S::kDqk / 64; c++)
      ptx::tma_load_4d(smem + S::kKeyAt + s * S::kKeyBytes + c * S::kKeys * 128, &maps.key, c * 64, head, n * S::kKeys,
                       batch, b.k_full + 8 * s);
    k_count++;
  }
  __device__ __forceinline__ void load_v(int head, int batch, int n) {
    const int s = v_count % S::kStages;
    ptx::mbarrier_wait(b.v_empty + 8 * s, (v_count / S::kStages & 1) ^ 1);
    ptx::mbarrier_arrive_expect_tx(b.v_full + 8 * s, S::kValueBytes);
#pragma unroll
    for (int c = 0; c < S::kDv / 64; c++)
      ptx::tma_load_4d(smem + S::kValueAt + s * S::kValueBytes + c * S::kKeys * 128, &maps.value, c * 64, head,
                       n * S::kKeys, batch, b.v_full + 8 * s);
    v_count++;
  }

  // warpgroup w's part of a tile: its slot, and its rows of Q
  __device__ __forceinline__ void feed_group(int w, int round, bool more, const ForwardTile& t) {
    const int at = w * S::kQueryStages + round % S::kQueryStages;
    ptx::mbarrier_wait(b.q_empty + 8 * at, (round / S::kQueryStages & 1) ^ 1);
    const int row = t.row + 64 * w;
    const int sees = S::kCausal ? max(1, min(p.kv_len, min(row + 64, p.q_len) + p.offset)) : p.kv_len;
    Slot& x = slots[w * 4 + round % 4];
    x.key_tiles = more ? t.key_tiles : -1;
    x.first = min(t.key_tiles, (sees + S::kKeys - 1) / S::kKeys) - 1;
    x.whole = (S::kCausal ? max(0, min(p.kv_len, row + p.offset + 1)) : p.kv_len) / S::kKeys;
    x.row = t.row;
    x.head = t.head;
    x.batch = t.batch;
    if (t.key_tiles) {
      ptx::mbarrier_arrive_expect_tx(b.q_full + 8 * at, S::kQueryBytes);
#pragma unroll
      for (int c = 0; c < S::kDqk / 64; c++)
        ptx::tma_load_4d(smem + at * S::kQueryBytes + c * 64 * 128, &maps.query, c * 64, t.head, row, t.batch,
                         b.q_full + 8 * at);
    } else {
      ptx::mbarrier_arrive(b.q_full + 8 * at);
    }
  }

  __device__ __forceinline__ void run() {
    int last_head = -1, last_batch = 0;  // a V tile that is still to be loaded: tile 0 of that head
    uint32_t next = 0;
    for (int i = blockIdx.x, round = 0;; i = p.counter ? int(next) : i + int(gridDim.x), round++) {
      const bool more = i < p.total;
      const ForwardTile t = more ? forward_tile<S::kRows, S::kKeys, S::kCausal>(p, i) : ForwardTile{0, 0, 0, 0};
      const int head_k = t.head / p.group;
      if (t.key_tiles) load_k(head_k, t.batch, t.key_tiles - 1);
#pragma unroll
      for (int w = 0; w < S::kGroups; w++) feed_group(w, round, more, t);
      if (last_head >= 0) {
        load_v(last_head, last_batch, 0);
        last_head = -1;
      }
      if (!more) break;
      if (p.counter) next = gridDim.x + ptx::atomic_add(p.counter, 1);
      for (int n = t.key_tiles - 2; n >= 0; n--) {
        load_k(head_k, t.batch, n);
        load_v(head_k, t.batch, n + 1);
      }
      if (t.key_tiles) {
        last_head = head_k;
        last_batch = t.batch;
      }
    }
    // The last block to finish leaves the counter as it was found.
    if (p.counter && ptx::atomic_add(p.counter + 1, 1) == gridDim.x - 1) {
      ptx::atomic_add(p.counter, 0u - uint32_t(p.total));
      ptx::atomic_add(p.counter + 1, 0u - gridDim.x);
    }
  }
};

}  // namespace attnjourney
