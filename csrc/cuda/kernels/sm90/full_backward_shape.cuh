// The Hopper backward with options: tile sizes and shared memory besides those of Sm90BackwardShape, and the tensor
// maps.
#pragma once
#include "backward_shape.cuh"
#include "cuda/kernels/common/tile_kinds.cuh"

namespace attnjourney {

template <class T_, int D, int Rows, bool Deterministic>
struct Sm90FullBackwardShape : Sm90BackwardShape<T_, D, Rows, Deterministic> {
  using Base = Sm90BackwardShape<T_, D, Rows, Deterministic>;
  // A step is 64 rows of a tile, by columns the tile.
  static constexpr int kParts = Base::kByColumns ? 1 : Rows / 64;
  static constexpr int kQueryStages = 2, kOutStages = Base::kOutStages, kStages = kQueryStages + kOutStages;
  static constexpr int kInverseBytes = kOutStages * Rows * 4;
  // Tiles of a 16-bit mask: rows of panels of 64 keys. Or what each thread fetches of another floating one.
  static constexpr int kMaskStages = Deterministic && D == 64 ? 1 : 2, kMaskPanels = Base::kKeys / 64;
  static constexpr int kMaskPanel = Rows * 128, kMaskBytes = kMaskPanels * kMaskPanel;
  static constexpr int kOwnBytes = (Base::kByColumns ? 32 : 64) * 64 * 4;  // of a warpgroup
  static_assert(kMaskStages * kMaskBytes >= 2 * kOwnBytes);
  struct Work {  // what a block works on, in shared memory: registers are short
    BackwardTile where;
    Sequence sequence;
    BackwardQueries<Rows, Base::kKeys, true> queries;
    int64_t mask_batch, gradient_batch;  // where the item's mask begins, and its gradient
    int zero;                            // see anew
    uint32_t tiles;                      // that the mask leaves, once the last one has been handed out
    __device__ __forceinline__ int total() const { return queries.per_head() * where.heads; }
  };
  // Scores are worked on 64 rows at a time, by columns 32: such a part of a tile, as a shape of its own.
  struct Part : Base {
    static constexpr int kRows = 64, kScoreRows = Base::kByColumns ? 32 : 64, kQueryPanel = 64 * 128;
    static constexpr int kQueryBytes = Base::kPanels * kQueryPanel, kOutBytes = kQueryBytes;
  };
  static constexpr int kScoreTiles = 3 - kParts;  // dS of two steps; by columns dS and weights
  static constexpr int kSlopeBytes = 32, kMarkBytes = Base::kKeys * 4;
  static_assert(kParts == 1 || Base::kPanels == 1);  // 64 rows lie together
  static constexpr int kRing = 4,
                       kReaders = 8 + 1 + (Deterministic ? 2 : 0);  // of tiles' numbers; warps that read them
  static constexpr int kSmemBytes = 2 * Base::kKeyBytes + kStages * Base::kQueryBytes +
                                    kScoreTiles * Base::kScoreBytes + Base::kSumBytes + kMaskStages * kMaskBytes +
                                    kStages * Rows * 4 + kInverseBytes +
                                    8 * (1 + 2 * kStages + 2 * kMaskStages + 2 * kRing) + 20 * kRing + kSlopeBytes +
                                    16 + 96 + 2 * kMarkBytes + sizeof(Work);
  static_assert(kSmemBytes <= 227 * 1024);
};

// The same number, by way of shared memory: what is computed of it is computed where it is used, while addresses made
// of threadIdx or of a loop's number would be held, or kept for their next use, in registers that there are not.
template <class Work>
__device__ __forceinline__ int anew(int x, const Work& work) {
  return x + *static_cast<const volatile int*>(&work.zero);
}
// this thread of the two warpgroups
template <class Work>
__device__ __forceinline__ int thread_of(const Work& work) {
  return (anew(static_cast<int>(threadIdx.x), work) - 128) & 255;
}

template <class Shape>
struct Sm90FullBackwardMemory : Sm90BackwardMemory<Shape> {
  uint32_t mask;     // [stage][panel][row][64 keys], swizzled
  uint32_t inverse;  // of the rows' statistics
  uint32_t mask_full, mask_empty, ring_full, ring_empty, ring, slopes, work;
  explicit __device__ __forceinline__ Sm90FullBackwardMemory(uint32_t base)
      : Sm90BackwardMemory<Shape>(base, Shape::kScoreTiles, Shape::kMaskStages * Shape::kMaskBytes),
        mask(this->dq - Shape::kMaskStages * Shape::kMaskBytes),
        inverse(this->delta + Shape::kInverseBytes),
        mask_full(this->do_empty + 8 * Shape::kOutStages),
        mask_empty(mask_full + 8 * Shape::kMaskStages),
        ring_full(mask_empty + 8 * Shape::kMaskStages),
        ring_empty(ring_full + 8 * Shape::kRing),
        ring(ring_empty + 8 * Shape::kRing),
        slopes(ring + 20 * Shape::kRing) {
    this->votes = (slopes + Shape::kSlopeBytes + 15) & ~15u;
    this->keys = this->votes + 96;
    this->rows = this->keys + Shape::kMarkBytes;
    work = this->rows + Shape::kMarkBytes;
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Shape::kMaskStages; i++) {
      ptx::mbarrier_init(mask_full + 8 * i, 1);
      ptx::mbarrier_init(mask_empty + 8 * i, 8);
    }
    for (int i = 0; i < Shape::kRing; i++) {
      ptx::mbarrier_init(ring_full + 8 * i, 1);
      ptx::mbarrier_init(ring_empty + 8 * i, Shape::kReaders);
    }
    Sm90BackwardMemory<Shape>::init();
  }
};

// mask: a floating one in the dtype of query, sizes (kv_len, heads, q_len, batch) of its own, in boxes of 64 x kRows.
struct Sm90FullBackwardMaps {
  Sm90BackwardMaps tensors;
  ptx::TensorMap mask;
  bool mask_tiles, mask_batched;  // there is `mask`, else elements are read one by one; one for each batch item
  TileKinds kinds;                // of tiles of kRows x kKeys
};

}  // namespace attnjourney
