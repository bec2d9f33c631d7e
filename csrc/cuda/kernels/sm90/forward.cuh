// Attention forward for Hopper (after FlashAttention-3, arXiv 2407.08608). One block is a producer warpgroup, which
// feeds Q, K and V tiles by TMA and looks for values that are not finite, and consumer warpgroups of 64 query rows. The
// grid may be smaller than the number of tiles: a block then takes one tile after the other without a gap: the first S
// = Q K^T of a tile is issued before the last O += P V of the tile before it. Key tiles go from last to first, so that
// those with a mask come first.
#pragma once
#include "forward_guard.cuh"
#include "forward_output.cuh"
#include "forward_producer.cuh"
#include "forward_products.cuh"
#include "forward_scouts.cuh"
#include "forward_softmax.cuh"

namespace attnjourney {

// One thread of a consumer warpgroup.
template <class Shape>
struct Sm90ForwardConsumer {
  using T = typename Shape::T;
  using Slot = Sm90ForwardSlot;
  using Barriers = Sm90ForwardBarriers<Shape>;
  using Output = Sm90ForwardOutput<Shape>;
  using Guard = Sm90ForwardGuard<Shape>;
  using Products = Sm90ForwardProducts<Shape>;

  const uint32_t smem;
  unsigned char* const base;
  const Barriers& barriers;
  const Slot* const slots;
  const ptx::TensorMap& out_map;
  const ForwardTask& task;
  const int group, lane, own_row;  // own_row: of the tile; the thread has own_row + 8, too
  const uint32_t zero;             // 0, unknown to ptxas, which would put `early` where the weights are still read

  float out[Shape::kDv / 2], scores[Shape::kKeys / 2];
  uint32_t weights[Shape::kKeys / 16][4];  // of key tile `count`
  Sm90ForwardSoftmax<Shape> soft;
  int round = 0;       // tiles so far
  int count = 0;       // key tiles so far
  int key_tile = 0;    // the number of the one whose scores were last computed
  int next_tile = 0;   // of the one after it; less than 0: there is none
  bool hides = false;  // does it hide any key?
  int turn = 0;        // of the flags, where there are no scouts
  int2 next;           // start and first of the next slot

  __device__ __forceinline__ Sm90ForwardConsumer(uint32_t smem_, unsigned char* base_, const Barriers& barriers_,
                                                 const ptx::TensorMap& out_map_, const ForwardTask& task_)
      : smem(smem_),
        base(base_),
        barriers(barriers_),
        slots(reinterpret_cast<const Slot*>(base_ + Shape::kSlotsAt)),
        out_map(out_map_),
        task(task_),
        group(ptx::uniform(threadIdx.x / 128) - 1),
        lane(threadIdx.x % 32),
        own_row((threadIdx.x - 128) / 32 * 16 + lane / 4),
        zero(uint32_t(task_.total) >> 31) {
    soft.alpha[0] = soft.alpha[1] = 1.f;
  }

  // ---- what the warpgroups and the producer wait for ----

  __device__ __forceinline__ void release(uint32_t bar) const {
    if (lane == 0) ptx::mbarrier_arrive(bar);
  }
  __device__ __forceinline__ void token_wait() const {
    if (Shape::kPingPong) ptx::bar_sync(1 + group, 256);
  }
  __device__ __forceinline__ void token_pass() const {
    if (Shape::kPingPong) ptx::bar_arrive(1 + (group + 1 == Shape::kGroups ? 0 : group + 1), 256);
  }
  __device__ __forceinline__ void wait_k(int number) const {
    ptx::mbarrier_wait(barriers.k_full + 8 * (number % Shape::kStages), number / Shape::kStages & 1);
  }
  __device__ __forceinline__ void wait_v(int number) const {
    ptx::mbarrier_wait(barriers.v_full + 8 * (number % Shape::kStages), number / Shape::kStages & 1);
  }
  // to each block that brings some of it
  __device__ __forceinline__ void release_tile(uint32_t bar) const {
    if constexpr (Shape::kCluster == 1) return release(bar);
    if (lane == 0) {
#pragma unroll
      for (int rank = 0; rank < Shape::kCluster; rank++) ptx::mbarrier_arrive_at(bar, rank);
    }
  }
  __device__ __forceinline__ void release_k(int number) const {
    release_tile(barriers.k_empty + 8 * (number % Shape::kStages));
  }
  __device__ __forceinline__ void release_v(int number) const {
    release_tile(barriers.v_empty + 8 * (number % Shape::kStages));
  }

  // ---- the tile of rows ----

  // where registers are few, what follows from `round` is not held
  __device__ __forceinline__ int rounds() const { return Shape::kTight ? int(ptx::opaque(round)) : round; }
  __device__ __forceinline__ int query_stage() const {
    return group * Shape::kQueryStages + rounds() % Shape::kQueryStages;
  }
  __device__ __forceinline__ const Slot& slot(int before = 0) const {
    return slots[group * 4 + (rounds() - before) % 4];
  }
  __device__ __forceinline__ int peek() {  // where the next tile starts; less than 0: there is none
    ptx::mbarrier_wait(barriers.q_full + 8 * query_stage(), round / Shape::kQueryStages & 1);
    next = *reinterpret_cast<const int2*>(&slot());
    return ptx::uniform(next.x);
  }
  __device__ __forceinline__ void enter() {
    key_tile = ptx::uniform(next.y);
    soft.start();
  }
  __device__ __forceinline__ void release_q() {
    __syncwarp();  // @slot_read: by every lane
    release(barriers.q_empty + 8 * query_stage());
    round++;
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int e = 0; e < Shape::kDv / 2; e++) out[e] = 0.f;
  }

  // ---- one key tile ----

  __device__ __forceinline__ uint32_t value_of(int number) const {
    return smem + Shape::kValueAt + number % Shape::kStages * Shape::kValueBytes;
  }
  __device__ __forceinline__ void issue_scores(int number) {
    Products::scores(scores, smem + query_stage() * Shape::kQueryBytes,
                     smem + Shape::kKeyAt + number % Shape::kStages * Shape::kKeyBytes);
  }
  __device__ __forceinline__ void issue_output(int number) { Products::output(out, weights, value_of(number)); }
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int kk = 0; kk < Shape::kKeys / 16; kk++)
#pragma unroll
      for (int q = 0; q < 4; q++)
        weights[kk][q] = 2 * kk + q / 2 < Shape::kEarly
                             ? soft.early[4 * kk + q] ^ zero
                             : ptx::pack2<T>(scores[8 * kk + 2 * q], scores[8 * kk + 2 * q + 1]);
  }
  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int e = 0; e < Shape::kDv / 2; e++) out[e] *= soft.alpha[e >> 1 & 1];
  }
  __device__ __forceinline__ bool softmax() {
    if (hides) {
      const Slot& own = slot();
      soft.hide(scores, task, own.sequence(task), own.row + own_row, key_tile * Shape::kKeys + 2 * (lane % 4));
    }
    return soft.run(scores, task.score_scale, task);
  }
  // under the products: does the key tile hide anything, and which one follows?
  __device__ __forceinline__ void find_next() {
    next_tile = key_tile - 1;
    hides = key_tile >= task.kv_len / Shape::kKeys;
    if constexpr (Shape::kRanged) {
      const typename Slot::TileRange tiles = slot().tiles;
      if (key_tile == tiles.begin) next_tile = ptx::uniform(tiles.prefix) - 1;
      hides = key_tile < tiles.whole_begin || key_tile >= tiles.whole_end;
    }
  }
  // Scores of the key tile that is the `number`th, to weights but for packing; WithOutput: under the products and the
  // softmax runs O += P V of the one before. Returns whether the reference moved.
  template <bool WithOutput>
  __device__ __forceinline__ bool step(int number) {
    wait_k(number);
    token_wait();
    issue_scores(number);
    if (WithOutput) {
      wait_v(number - 1);
      issue_output(number - 1);
    }
    token_pass();
    find_next();
    ptx::wgmma_wait<WithOutput ? 1 : 0>();
    ptx::keep(scores);
    release_k(number);
    const bool moved = softmax();
    if (WithOutput) finish_output(number - 1);
    return moved;
  }
  __device__ __forceinline__ void finish_output(int number) {
    ptx::wgmma_wait<0>();  // @output_done
    ptx::keep(out);
    release_v(number);
  }
  // key tiles that only other warpgroups see
  __device__ __forceinline__ void pass_over(int number) {
    token_wait();
    token_pass();
    wait_k(number);
    wait_v(number);
    __syncwarp();  // @lanes_met: none may still wait when the next phase but one begins
    release_k(number);
    release_v(number);
  }

  // Where a tile hides something and a value is not finite, O += P V is left to mma.sync (forward_guard.cuh).
  __device__ __forceinline__ bool needs_fallback() {
    if (!Shape::kRanged || !hides) return false;
    wait_v(count);  // @value_known: by now the scouts' answers before this one are given
    if constexpr (Shape::kScouts)
      return Sm90ForwardScouts<Shape>::found(base, barriers, count);
    else
      return !Guard::finite(base + Shape::kValueAt + count % Shape::kStages * Shape::kValueBytes,
                            base + Shape::kFlagsAt, turn);
  }
  __device__ __forceinline__ void guarded_output() {
    Guard::product(out, weights, value_of(count));
    if constexpr (Shape::kTight) {  // or they would be held besides what the product needs
#pragma unroll
      for (int e = 0; e < Shape::kKeys / 2; e++) scores[e] = 0.f;
    }
    __syncwarp();
    release_v(count);  // @value_released
  }

  __device__ __forceinline__ void run() {
    if (Shape::kPingPong && group == Shape::kGroups - 1) ptx::bar_arrive(1, 256);
    int start = peek();
    for (bool started = false;;) {
      if (!started) {
        for (; start == 0; start = peek()) {
          Output::write_zeros(own_row, lane % 4, slot(), task);
          release_q();
        }
        if (start < 0) break;
        enter();
        for (int k = 1; k < start; k++, count++) pass_over(count);
        step<false>(count);
        pack();
        clear();
      }
      while (next_tile >= 0) {
        bool moved;
        if (needs_fallback()) {
          guarded_output();
          key_tile = next_tile;
          moved = step<false>(count + 1);
        } else {
          key_tile = next_tile;
          moved = step<true>(count + 1);
        }
        pack();
        if (moved) rescale();
        count++;
      }
      release_q();  // first: the last values come after the next tile's queries
      const bool fallback = needs_fallback();
      if (fallback) guarded_output();
      const float last_max[2] = {soft.max[0], soft.max[1]}, last_sum[2] = {soft.sum[0], soft.sum[1]};
      start = peek();
      started = start == 1 && !fallback;
      if (started) {  // as above, across two tiles
        enter();
        step<true>(count + 1);
      } else if (!fallback) {
        wait_v(count);
        issue_output(count);
        finish_output(count);
      }
      if (started) pack();
      count++;
      if (Shape::kStore)
        Output::store(out, last_max, last_sum, own_row, lane, smem, base, slot(1), out_map, task);
      else
        Output::write(out, last_max, last_sum, task.score_scale, own_row, lane % 4, slot(1), task);
      clear();
    }
    if (Shape::kStore && lane == 0) ptx::bulk_wait_read<0>();
  }
};

template <class Shape>
struct Sm90Forward {
  static __device__ __forceinline__ void run(const Sm90ForwardMaps& maps, const ForwardTask& task) {
    using Barriers = Sm90ForwardBarriers<Shape>;
    sm90_forward_roles<Shape>(
        [&](uint32_t smem, unsigned char* base, const Barriers& barriers) {
          auto* const slots = reinterpret_cast<Sm90ForwardSlot*>(base + Shape::kSlotsAt);
          Sm90ForwardProducer<Shape>{{smem, barriers, maps, task}, slots}.run();
        },
        [&](uint32_t smem, unsigned char* base, const Barriers& barriers) {
          Sm90ForwardConsumer<Shape>(smem, base, barriers, maps.out, task).run();
        },
        [&](unsigned char* base, const Barriers& barriers) {
          if constexpr (Shape::kScouts) Sm90ForwardScouts<Shape>::run(base, barriers);
        });
  }
};

// grid: at most the number of tiles
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm90_forward(const __grid_constant__ Sm90ForwardMaps maps, const __grid_constant__ ForwardTask task) {
  Sm90Forward<Shape>::run(maps, task);
}

}  // namespace attnjourney
