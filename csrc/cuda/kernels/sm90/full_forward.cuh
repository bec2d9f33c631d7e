// Attention forward for Hopper with all options (scores.cuh): the producer of the plain one, which skips the tiles that
// a mask hides, and two consumer warpgroups of 64 query rows. A pass before it (common/tile_kinds.cuh) finds which
// tiles a boolean mask or one of blocks hides or leaves whole; with each tile the producer passes on which one it is
// and what it is to either warpgroup, and in whole tiles no mask is read.
//
// Under the products of a tile a warpgroup reads a boolean mask's elements for its fragments, two keys in one load
// where strides and alignment allow, and draws dropout's bits. P V of a tile runs under the scores of the next one.
//
// A floating mask comes by TMA, asked for a tile ahead, into a ring of two parts, and ldmatrix gives it in the layout
// of the scores: it needs no registers but those it is added from. Where TMA does not take it (common/mask_tiles.cuh)
// each warp copies its rows there under the products. One in float32 has kernels of its own: two parts a tile, and the
// two warpgroups overlap only each other. Scores stay products, scaled in the exponential, unless an option needs them
// in units of log2. Not yet measured on a GPU. Proofs: tests/emulator/test_full_sm90.py,
// tests/emulator/faults/full_forward.py.
#pragma once
#include "forward_guard.cuh"
#include "forward_output.cuh"
#include "forward_products.cuh"
#include "full_producer.cuh"
#include "full_scores.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90FullForward {
  using T = typename Shape::T;
  using Slot = Sm90FullSlot;
  using Tile = Sm90FullTile;
  using Barriers = Sm90ForwardBarriers<Shape>;
  using Output = Sm90ForwardOutput<Shape>;
  using Guard = Sm90ForwardGuard<Shape>;
  using Products = Sm90ForwardProducts<Shape>;
  using Options = Sm90FullScores<Shape>;

  static __device__ __forceinline__ void consume(uint32_t smem, unsigned char* base, const Barriers& barriers,
                                                 const Slot* slots, const Tile* stages, const Sm90FullForwardMaps& maps,
                                                 const ForwardTask& task) {
    const int group = ptx::uniform(threadIdx.x / 128) - 1;
    // recomputed where they are used: registers are few
    const auto lane = [] { return int(ptx::opaque(threadIdx.x)) % 32; };
    const auto first_row = [] {  // this thread's row of the tile; the other one is 8 further
      const int tid = int(ptx::opaque(threadIdx.x)) - 128;
      return tid / 32 * 16 + tid % 32 / 4;
    };
    const float unit = Options::unit_of(task);
    const auto release = [&](uint32_t bar) {
      if (lane() == 0) ptx::mbarrier_arrive(bar);
    };
    const auto stage = [](int count) { return count % Shape::kStages; };
    const auto wait_k = [&](int count) {
      ptx::mbarrier_wait(barriers.k_full + 8 * stage(count), count / Shape::kStages & 1);
    };
    const auto wait_v = [&](int count) {
      ptx::mbarrier_wait(barriers.v_full + 8 * stage(count), count / Shape::kStages & 1);
    };
    const auto release_k = [&](int count) { release(barriers.k_empty + 8 * stage(count)); };
    const auto release_v = [&](int count) { release(barriers.v_empty + 8 * stage(count)); };

    float out[Shape::kDv / 2], scores[Shape::kKeys / 2];
    uint32_t weights[Shape::kKeys / 16][4];  // of key tile `tile_count`
    Sm90ForwardSoftmax<Shape> soft;
    int tile_count = 0;  // key tiles so far
    int turn = 0;        // of the flags
    for (int round = 0;; round++) {
      const int query = group * Shape::kQueryStages + round % Shape::kQueryStages;
      const Slot& slot = slots[group * 4 + round % 4];
      ptx::mbarrier_wait(barriers.q_full + 8 * query, round / Shape::kQueryStages & 1);
      const int start = ptx::uniform(slot.start);
      if (start < 0) break;
      begin(soft, task, slot, slot.row + first_row(), lane() % 4);
#pragma unroll
      for (int e = 0; e < Shape::kDv / 2; e++) out[e] = 0.f;

      Tile tile{0, 0};
      bool hides = false;
      const auto release_q = [&](const Tile& of) {  // after its last product; slots are twice as many, at least
        if (of.last()) release(barriers.q_empty + 8 * query);
      };
      const auto arrived = [&](int count) -> Tile {  // K of the next tile, and which one it is
        wait_k(count);
        const Tile next = stages[stage(count)];
        __syncwarp();  // @tile_read: one lane releases it for all
        return {ptx::uniform(next.number), ptx::uniform(next.flags)};
      };
      const auto qk = [&](int count) {
        Products::scores(scores, ptx::opaque(smem + query * Shape::kQueryBytes),
                         smem + Shape::kKeyAt + stage(count) * Shape::kKeyBytes);
      };
      const auto pv = [&](int count) {
        Products::output(out, weights, smem + Shape::kValueAt + stage(count) * Shape::kValueBytes);
      };
      const auto prefetch = [&](Options& options) {
        options.prefetch(slot, tile.number, tile.kind(group), slot.row + first_row(), lane());
      };
      const auto softmax = [&](Options& options, int count) {
        hides = options.apply(scores, slot, tile.number, count, tile.kind(group), slot.row + first_row(), lane());
        const bool moved = soft.run(scores, unit, task);
        options.drop(scores);
        return moved;
      };
      const auto pack = [&](bool moved) {
#pragma unroll
        for (int kk = 0; kk < Shape::kKeys / 16; kk++)
#pragma unroll
          for (int q = 0; q < 4; q++)
            weights[kk][q] = ptx::pack2<T>(scores[8 * kk + 2 * q], scores[8 * kk + 2 * q + 1]);
        if (moved) {
#pragma unroll
          for (int e = 0; e < Shape::kDv / 2; e++) out[e] *= soft.alpha[e >> 1 & 1];
        }
      };
      // Does the key tile hide something, and is a value not finite? Then its product is left to mma.sync
      // (forward_guard.cuh).
      const auto leaks = [&] {
        bool border = tile.kind(group) != TileKind::whole;
        unsigned char* flags = base + Shape::kFlagsAt;
        if (Shape::kBias)
          border = group_any(hides, reinterpret_cast<uint32_t*>(flags) + 8 * group, turn, 4 + group) || border;
        if (!border) return false;
        wait_v(tile_count);
        return !Guard::finite(base + Shape::kValueAt + stage(tile_count) * Shape::kValueBytes, flags, turn);
      };

      if (start == 0) {
        __syncwarp();  // @no_tile: or lanes still waiting would see the phase after the next one
        release(barriers.q_empty + 8 * query);
      }
      for (bool more = start > 0; more; tile_count++) {  // runs of tiles that this warpgroup sees
        tile = arrived(tile_count);
        if (tile.kind(group) == TileKind::hidden) {
          if constexpr (Shape::kBias) Options(task, maps, smem, base).pass_bias(tile_count, lane());  // V may follow it
          wait_v(tile_count);
          __syncwarp();  // no lane may still be waiting when the next phase but one begins
          release_k(tile_count);
          release_q(tile);
          release_v(tile_count);
          more = !tile.last();
          continue;
        }
        Options first(task, maps, smem, base);
        qk(tile_count);
        prefetch(first);
        ptx::wgmma_wait<0>();
        ptx::keep(scores);
        release_k(tile_count);
        release_q(tile);
        pack(softmax(first, tile_count));
        bool needs_fallback = leaks();
        while (Shape::kOverlap && !needs_fallback && !tile.last()) {
          const Tile next = arrived(tile_count + 1);
          if (next.kind(group) == TileKind::hidden) break;
          tile = next;
          Options options(task, maps, smem, base);
          qk(tile_count + 1);
          wait_v(tile_count);
          pv(tile_count);
          prefetch(options);
          ptx::wgmma_wait<1>();
          ptx::keep(scores);
          release_k(tile_count + 1);
          release_q(tile);
          const bool moved = softmax(options, tile_count + 1);
          ptx::wgmma_wait<0>();
          ptx::keep(out);
          release_v(tile_count);
          pack(moved);
          tile_count++;
          needs_fallback = leaks();
        }
        wait_v(tile_count);
        if (needs_fallback) {
          Guard::product(out, weights, smem + Shape::kValueAt + stage(tile_count) * Shape::kValueBytes);
          __syncwarp();
        } else {
          pv(tile_count);
          ptx::wgmma_wait<0>();
          ptx::keep(out);
        }
        release_v(tile_count);
        more = !tile.last();
      }
      Output::write(out, soft.max, soft.sum, unit, first_row(), lane() % 4, slot, task);
    }
  }

  // the sums of two rows before any key: nothing, or their sink
  static __device__ __forceinline__ void begin(Sm90ForwardSoftmax<Shape>& soft, const ForwardTask& task,
                                               const Slot& slot, int row, int t) {
    soft.start();
    soft.alpha[0] = soft.alpha[1] = 1.f;
    if (!task.scores.sinks) return;
    const float sink = task.scores.sinks[slot.scores().index];
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (row + 8 * h < slot.q_len && sink != -INFINITY) {
        soft.max[h] = sink_score(task.scores, sink);
        soft.sum[h] = t == 0 ? soft.weight_unit(task) : 0.f;
      }
  }

  static __device__ __forceinline__ void run(const Sm90FullForwardMaps& maps, const ForwardTask& task,
                                             const TileKinds& kinds) {
    if (Shape::kBias && threadIdx.x == 0) Sm90FullMaskPart<Shape>::init(ptx::smem_addr(ptx::dynamic_smem()));
    sm90_forward_roles<Shape>(
        [&](uint32_t smem, unsigned char* base, const Barriers& barriers) {
          Sm90FullProducer<Shape>{{smem, barriers, maps, task},
                                  reinterpret_cast<Slot*>(base + Shape::kSlotsAt),
                                  reinterpret_cast<Tile*>(base + Shape::kTilesAt),
                                  kinds,
                                  maps}
              .run();
        },
        [&](uint32_t smem, unsigned char* base, const Barriers& barriers) {
          consume(smem, base, barriers, reinterpret_cast<const Slot*>(base + Shape::kSlotsAt),
                  reinterpret_cast<const Tile*>(base + Shape::kTilesAt), maps, task);
        });
  }
};

// grid: at most the number of tiles; kinds: of 64 rows x kKeys keys
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm90_full_forward(const __grid_constant__ Sm90FullForwardMaps maps, const __grid_constant__ ForwardTask task,
                      const __grid_constant__ TileKinds kinds) {
  Sm90FullForward<Shape>::run(maps, task, kinds);
}

}  // namespace attnjourney
