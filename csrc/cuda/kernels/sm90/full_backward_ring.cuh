// Which query tiles a block of the Hopper backward with options works on: one warp, the scheduler, leaves out those
// in which a boolean mask or one of blocks hides all, and hands the others on through a ring in shared memory.
#pragma once
#include "cuda/kernels/common/tile_kinds.cuh"
#include "full_backward_shape.cuh"

namespace attnjourney {

// In shared memory, as all that is asked for again: registers are short.
struct RingTile {
  int number;      // among those of the block; -1: no more tiles
  int head, tile;  // of a query head's
  int scratch;     // among those of the rows' statistics and query_sum
  bool whole;      // the mask hides nothing of it
  __device__ __forceinline__ bool exists() const { return number >= 0; }
};

template <class Shape>
struct TileRing {
  const Sm90FullBackwardMemory<Shape>& memory;
  unsigned char* const smem;
  __device__ __forceinline__ TileRing(const Sm90FullBackwardMemory<Shape>& memory_, unsigned char* smem_)
      : memory(memory_), smem(smem_) {}
  __device__ __forceinline__ RingTile& slot(uint32_t n) const {
    return reinterpret_cast<RingTile*>(smem + (memory.ring - memory.k))[n % Shape::kRing];
  }
  // the n-th tile, by one thread
  __device__ __forceinline__ void push(uint32_t n, const RingTile& tile) const {
    ptx::mbarrier_wait(memory.ring_empty + n % Shape::kRing * 8, n / Shape::kRing % 2 ^ 1);
    slot(n) = tile;
    ptx::mbarrier_arrive(memory.ring_full + n % Shape::kRing * 8);
  }
  // To be read until it is released, once by each warp that reads.
  __device__ __forceinline__ const RingTile& wait(uint32_t n) const {
    ptx::mbarrier_wait(memory.ring_full + n % Shape::kRing * 8, n / Shape::kRing % 2);
    return slot(n);
  }
  __device__ __forceinline__ uint32_t empty(uint32_t n) const { return memory.ring_empty + n % Shape::kRing * 8; }
};

template <class Shape>
class Sm90Scheduler {
  static constexpr int kRows = Shape::kRows;

 public:
  // The whole warp.
  static __device__ __forceinline__ void run(const TileKinds& kinds, const BackwardTask& task,
                                             const typename Shape::Work& work,
                                             const Sm90FullBackwardMemory<Shape>& memory, unsigned char* smem) {
    const TileRing<Shape> ring(memory, smem);
    const int lane = threadIdx.x % 32, total = work.total();
    uint32_t count = 0;
    const auto push = [&](int number, bool whole) {
      if (lane == 0) {
        const auto at = work.queries.number(number, work.where.first_head);
        const auto scratch = static_cast<int>(scratch_row(task, work.where.batch, at.head) / kRows) + at.tile;
        ring.push(count, {number, at.head, at.tile, scratch, whole});
      }
      count++;
    };
    if (kinds.bits) {
#pragma unroll 1
      for (int first = 0; first < total; first += 32) {  // a tile a lane
        const TileKind kind = first + lane < total ? kind_of(kinds, task, work, first + lane) : TileKind::hidden;
        uint32_t left = ptx::ballot(kind != TileKind::hidden);
        const uint32_t whole = ptx::ballot(kind == TileKind::whole);
#pragma unroll 1
        for (; left; left &= left - 1) push(first + ptx::first_bit(left), whole >> ptx::first_bit(left) & 1);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < total; i++) push(i, true);
    }
    if (lane == 0) {
      reinterpret_cast<typename Shape::Work*>(smem + (memory.work - memory.k))->tiles = count;
      ring.push(count, {-1, 0, 0, 0, false});
    }
  }

 private:
  static __device__ __forceinline__ TileKind kind_of(const TileKinds& kinds, const BackwardTask& task,
                                                     const typename Shape::Work& work, int i) {
    const auto at = work.queries.number(i, work.where.first_head);
    return TileKinds::kind(kinds.of(task.scores, work.where.batch, at.head, at.tile), work.where.key_tile);
  }
};

}  // namespace attnjourney
