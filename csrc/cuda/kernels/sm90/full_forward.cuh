// Attention forward for Hopper with all options (scores.cuh): the producer of the plain one past the tiles that a mask
// hides, and two consumer warpgroups of 64 query rows. Under the products Q K^T of a tile and P V of the one before it
// a warpgroup reads its part of the mask and draws dropout's bits.
#pragma once
#include "forward_guard.cuh"
#include "forward_output.cuh"
#include "forward_products.cuh"
#include "full_producer.cuh"
#include "full_scores.cuh"

namespace attnjourney {

template <class S>
struct Sm90FullForward {
  using T = typename S::T;
  using Slot = Sm90FullSlot;
  using Tile = Sm90FullTile;
  using Barriers = Sm90ForwardBarriers<S>;
  using Output = Sm90ForwardOutput<S>;
  using Guard = Sm90ForwardGuard<S>;
  using Products = Sm90ForwardProducts<S>;
  using Options = Sm90FullScores<S>;

  static __device__ __forceinline__ void consume(uint32_t smem, unsigned char* base, const Barriers& b,
                                                 const Slot* slots, const Tile* stages, const ForwardTask& p) {
    const int group = ptx::uniform(threadIdx.x / 128) - 1;
    // found out again where they are used: registers are few
    const auto lane = [] { return int(ptx::opaque(threadIdx.x)) % 32; };
    const auto first_row = [] {  // this thread's row of the tile; the other one is 8 further
      const int tid = int(ptx::opaque(threadIdx.x)) - 128;
      return tid / 32 * 16 + tid % 32 / 4;
    };
    const float unit = Options::unit_of(p);
    const auto release = [&](uint32_t bar) {
      if (lane() == 0) ptx::mbarrier_arrive(bar);
    };
    const auto stage = [](int count) { return count % S::kStages; };
    const auto wait_k = [&](int count) { ptx::mbarrier_wait(b.k_full + 8 * stage(count), count / S::kStages & 1); };
    const auto wait_v = [&](int count) { ptx::mbarrier_wait(b.v_full + 8 * stage(count), count / S::kStages & 1); };
    const auto release_k = [&](int count) { release(b.k_empty + 8 * stage(count)); };
    const auto release_v = [&](int count) { release(b.v_empty + 8 * stage(count)); };

    float o[S::kDv / 2], s[S::kKeys / 2];
    uint32_t pr[S::kKeys / 16][4];  // the weights of tile c
    Sm90ForwardSoftmax<S> soft;
    int c = 0;     // key tiles so far
    int turn = 0;  // of the flags
    for (int round = 0;; round++) {
      const int query = group * S::kQueryStages + round % S::kQueryStages;
      const Slot& x = slots[group * 4 + round % 4];
      ptx::mbarrier_wait(b.q_full + 8 * query, round / S::kQueryStages & 1);
      const int start = ptx::uniform(x.start);
      if (start < 0) break;
      begin(soft, p, x, x.row + first_row(), lane() % 4);
#pragma unroll
      for (int e = 0; e < S::kDv / 2; e++) o[e] = 0.f;

      Tile tile{0, 0};
      bool hides = false;
      const auto arrived = [&](int count) -> Tile {  // K of the next tile, and which one it is
        wait_k(count);
        const Tile next = stages[stage(count)];
        __syncwarp();  // @tile_read: one lane releases it for all
        return {ptx::uniform(next.number), ptx::uniform(next.flags)};
      };
      const auto qk = [&](int count) {
        Products::scores(s, ptx::opaque(smem + query * S::kQueryBytes), smem + S::kKeyAt + stage(count) * S::kKeyBytes);
      };
      const auto pv = [&](int count) { Products::output(o, pr, smem + S::kValueAt + stage(count) * S::kValueBytes); };
      const auto look = [&](Options& options) {
        options.look(x, tile.number, tile.kind(group), x.row + first_row(), lane());
      };
      const auto softmax = [&](Options& options) {
        hides = options.apply(s, x, tile.number, tile.kind(group), x.row + first_row(), lane());
        const bool moved = soft.run(s, unit);
        options.drop(s);
        return moved;
      };
      const auto pack = [&](bool moved) {
#pragma unroll
        for (int kk = 0; kk < S::kKeys / 16; kk++)
#pragma unroll
          for (int q = 0; q < 4; q++) pr[kk][q] = ptx::pack2<T>(s[8 * kk + 2 * q], s[8 * kk + 2 * q + 1]);
        if (moved) {
#pragma unroll
          for (int e = 0; e < S::kDv / 2; e++) o[e] *= soft.alpha[e >> 1 & 1];
        }
      };
      // Does tile c hide something, and is a value not finite? Then its product is left to mma.sync (csrc/README.md).
      const auto leaks = [&] {
        bool border = tile.kind(group) != TileKind::whole;
        unsigned char* flags = base + S::kFlagsAt;
        if (S::kBias)
          border = group_any(hides, reinterpret_cast<uint32_t*>(flags) + 8 * group, turn, 4 + group) || border;
        if (!border) return false;
        wait_v(c);
        return !Guard::finite(base + S::kValueAt + stage(c) * S::kValueBytes, flags, turn);
      };

      for (bool more = start > 0; more; c++) {  // runs of tiles that this warpgroup sees
        tile = arrived(c);
        if (tile.kind(group) == TileKind::hidden) {
          wait_v(c);
          __syncwarp();  // no lane may still be waiting when the next phase but one begins
          release_k(c);
          release_v(c);
          more = !tile.last();
          continue;
        }
        Options first(p);
        qk(c);
        look(first);
        ptx::wgmma_wait<0>();
        ptx::keep(s);
        release_k(c);
        pack(softmax(first));
        bool rare = leaks();
        while (S::kOverlap && !rare && !tile.last()) {
          const Tile next = arrived(c + 1);
          if (next.kind(group) == TileKind::hidden) break;
          tile = next;
          Options options(p);
          qk(c + 1);
          wait_v(c);
          pv(c);
          look(options);
          ptx::wgmma_wait<1>();
          ptx::keep(s);
          release_k(c + 1);
          const bool moved = softmax(options);
          ptx::wgmma_wait<0>();
          ptx::keep(o);
          release_v(c);
          pack(moved);
          c++;
          rare = leaks();
        }
        wait_v(c);
        if (rare) {
          Guard::product(o, pr, smem + S::kValueAt + stage(c) * S::kValueBytes);
          __syncwarp();
        } else {
          pv(c);
          ptx::wgmma_wait<0>();
          ptx::keep(o);
        }
        release_v(c);
        more = !tile.last();
      }
      Output::write(o, soft.max, soft.sum, unit, first_row(), lane() % 4, x, p);
      __syncwarp();
      release(b.q_empty + 8 * query);
    }
  }

  // the sums of two rows before any key: nothing, or their sink
  static __device__ __forceinline__ void begin(Sm90ForwardSoftmax<S>& soft, const ForwardTask& p, const Slot& x,
                                               int row, int t) {
    soft.start();
    soft.alpha[0] = soft.alpha[1] = 1.f;
    if (!p.scores.sinks) return;
    const float sink = p.scores.sinks[x.scores().index];
#pragma unroll
    for (int h = 0; h < 2; h++)
      if (row + 8 * h < x.q_len && sink != -INFINITY) {
        soft.max[h] = sink_log2(sink);
        soft.sum[h] = t == 0 ? 1.f : 0.f;
      }
  }

  static __device__ __forceinline__ void run(const Sm90ForwardMaps& maps, const ForwardTask& p,
                                             const TileKinds& kinds) {
    sm90_forward_roles<S>(
        [&](uint32_t smem, unsigned char* base, const Barriers& b) {
          Sm90FullProducer<S>{{smem, b, maps, p},
                              reinterpret_cast<Slot*>(base + S::kSlotsAt),
                              reinterpret_cast<Tile*>(base + S::kTilesAt),
                              kinds}
              .run();
        },
        [&](uint32_t smem, unsigned char* base, const Barriers& b) {
          consume(smem, base, b, reinterpret_cast<const Slot*>(base + S::kSlotsAt),
                  reinterpret_cast<const Tile*>(base + S::kTilesAt), p);
        });
  }
};

// grid: at most the number of tiles; kinds: of 64 rows x kKeys keys
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    sm90_full_forward(const __grid_constant__ Sm90ForwardMaps maps, const __grid_constant__ ForwardTask p,
                      const __grid_constant__ TileKinds kinds) {
  Sm90FullForward<Shape>::run(maps, p, kinds);
}

}  // namespace attnjourney
