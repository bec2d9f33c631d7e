// Which query tiles a block of the Hopper backward with options works on: one warp, the scheduler, leaves out those
// in which a boolean mask or one of blocks hides all, and hands the others on through a ring in shared memory.
#pragma once
#include "cuda/kernels/common/scores.cuh"
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
  // One tile of a boolean mask, the whole warp: what of it hides? 16 keys a lane, four rows at a time.
  static __device__ __forceinline__ TileKind kind_of(const Scores& options, const unsigned char* mask, int rows,
                                                     int keys) {
    const int lane = threadIdx.x % 32;
    bool some = false, all = true;
    if (options.mask_row == 0) rows = 1;
    if (options.mask_col == 1 && options.mask_row % 16 == 0 && reinterpret_cast<uintptr_t>(mask) % 16 == 0) {
      const int first = lane % 8 * 16;
#pragma unroll 4
      for (int r = lane / 8; r < rows; r += 4) {
        const unsigned char* at = mask + r * options.mask_row + first;
        if (first + 16 <= keys) {
          const uint4 x = *reinterpret_cast<const uint4*>(at);
          some = some || (x.x | x.y | x.z | x.w);
          all = all && ones(x.x) && ones(x.y) && ones(x.z) && ones(x.w);
        } else {
          for (int k = first; k < keys; k++, at++) some = some || *at, all = all && *at;
        }
      }
    } else {
      const int width = options.mask_col == 0 ? 1 : keys;
      for (int r = 0; r < rows && (all || !some); r++) {
        for (int k = lane; k < width; k += 32) {
          const bool seen = mask[r * options.mask_row + k * options.mask_col];
          some = some || seen, all = all && seen;
        }
        some = ptx::any(some), all = !ptx::any(!all);
      }
    }
    return !ptx::any(some) ? TileKind::hidden : ptx::any(!all) ? TileKind::partial : TileKind::whole;
  }
  // four bytes, none of which is 0
  static __device__ __forceinline__ bool ones(uint32_t x) { return !((x - 0x01010101u) & ~x & 0x80808080u); }

  // The whole warp.
  static __device__ __forceinline__ void run(const BackwardTask& task, const typename Shape::Work& work,
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
    const Scores& options = task.scores;
    if (options.mask_kind == MaskElement::boolean) {
#pragma unroll 1
      for (int i = 0; i < total; i++) {
        const TileKind kind = kind_of_mask(task, work, i);
        if (kind != TileKind::hidden) push(i, kind == TileKind::whole);
      }
    } else if (options.mask_kind == MaskElement::blocks) {
#pragma unroll 1
      for (int first = 0; first < total; first += 32) {  // a tile a lane
        const TileKind kind = first + lane < total ? kind_of_blocks(task, work, first + lane) : TileKind::hidden;
        uint32_t left = ptx::ballot(kind != TileKind::hidden);
        const uint32_t whole = ptx::ballot(kind == TileKind::whole);
#pragma unroll 1
        for (; left; left &= left - 1) push(first + ptx::first_bit(left), whole >> ptx::first_bit(left) & 1);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < total; i++) push(i, true);
    }
    if (lane == 0) ring.push(count, {-1, 0, 0, 0, false});
  }

 private:
  static __device__ __forceinline__ int keys(const typename Shape::Work& work) {
    return min(Shape::kKeys, work.sequence.k_rows - work.where.key_tile * Shape::kKeys);
  }
  static __device__ __forceinline__ TileKind kind_of_mask(const BackwardTask& task, const typename Shape::Work& work,
                                                          int i) {
    const Scores& options = task.scores;
    const auto at = work.queries.number(i, work.where.first_head);
    const HeadScores head(task, task.q_heads, work.where.batch, at.head, work.mask_batch);
    const int m0 = at.tile * kRows, n0 = work.where.key_tile * Shape::kKeys;
    return kind_of(options, head.mask + m0 * options.mask_row + n0 * options.mask_col,
                   min(kRows, work.sequence.rows - m0), keys(work));
  }
  static __device__ __forceinline__ TileKind kind_of_blocks(const BackwardTask& task, const typename Shape::Work& work,
                                                            int i) {
    const auto at = work.queries.number(i, work.where.first_head);
    const HeadScores head(task, task.q_heads, work.where.batch, at.head, work.mask_batch);
    return head.blocks(task.scores).kind(at.tile * kRows, kRows, work.where.key_tile * Shape::kKeys, keys(work));
  }
};

}  // namespace attnjourney
