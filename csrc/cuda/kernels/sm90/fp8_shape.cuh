// Tile sizes and shared memory of the Hopper forward over e4m3, and its barriers.
#pragma once
#include "cuda/ptx/sm90.cuh"
#include "fp8_task.cuh"

namespace attnjourney {

// Boxes of kLine columns: query by 64 rows, key and value by kKeys.
struct Sm90Fp8Maps {
  ptx::TensorMap query, key, value;
};

// D: columns of query, key and value. Stages: of K, of V and of V^T.
template <int D, int Keys, int Stages>
struct Sm90Fp8Shape {
  static constexpr int kD = D, kKeys = Keys, kStages = Stages;
  static constexpr int kGroups = 2, kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  static constexpr int kTurners = 3;                                // warps that turn V
  static constexpr int kLine = D < 128 ? D : 128;                   // bytes of a row in a panel of Q, K and V
  static constexpr int kQueryBytes = 64 * D, kKeyBytes = Keys * D;  // V and V^T have those of K
  // offsets in shared memory
  static constexpr int kKeyAt = kGroups * kQueryBytes, kValueAt = kKeyAt + kStages * kKeyBytes;
  static constexpr int kTurnedAt = kValueAt + kStages * kKeyBytes;  // V^T: D rows of Keys bytes
  static constexpr int kBarriersAt = kTurnedAt + kStages * kKeyBytes;
  static constexpr int kNanAt = kBarriersAt + 8 * (kGroups + 6 * kStages);  // a word for each stage and turner
  static constexpr int kSmemBytes = kNanAt + 16 * kStages;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(D % 64 == 0 && (Keys == 64 || Keys == 128) && kFp8ScaleRows % Keys == 0 && kRows == kFp8ScaleRows);
  static_assert(kSmemBytes <= 227 * 1024);
};

// Addresses of the mbarriers: of each warpgroup's Q, and of the stages of K, V and V^T.
template <class Shape>
struct Sm90Fp8Barriers {
  uint32_t q_full, k_full, k_empty, v_full, v_empty, turned_full, turned_empty;
  explicit __device__ __forceinline__ Sm90Fp8Barriers(uint32_t base)
      : q_full(base),
        k_full(q_full + 8 * Shape::kGroups),
        k_empty(k_full + 8 * Shape::kStages),
        v_full(k_empty + 8 * Shape::kStages),
        v_empty(v_full + 8 * Shape::kStages),
        turned_full(v_empty + 8 * Shape::kStages),
        turned_empty(turned_full + 8 * Shape::kStages) {}
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Shape::kGroups; i++) ptx::mbarrier_init(q_full + 8 * i, 1);
    for (int i = 0; i < Shape::kStages; i++) {
      ptx::mbarrier_init(k_full + 8 * i, 1);
      ptx::mbarrier_init(k_empty + 8 * i, 4 * Shape::kGroups);
      ptx::mbarrier_init(v_full + 8 * i, 1);
      ptx::mbarrier_init(v_empty + 8 * i, Shape::kTurners);
      ptx::mbarrier_init(turned_full + 8 * i, 32 * Shape::kTurners);
      ptx::mbarrier_init(turned_empty + 8 * i, 4 * Shape::kGroups);
    }
    ptx::fence_mbarrier_init();
  }
};

// Waits and counts of a ring of stages: use `number` of it.
template <class Shape>
__device__ __forceinline__ void wait_full(uint32_t bar, int number) {
  ptx::mbarrier_wait(bar + 8 * (number % Shape::kStages), number / Shape::kStages & 1);
}
template <class Shape>
__device__ __forceinline__ void wait_empty(uint32_t bar, int number) {
  ptx::mbarrier_wait(bar + 8 * (number % Shape::kStages), (number / Shape::kStages & 1) ^ 1);
}

// What every thread of a block knows of its tile of rows.
struct Fp8Tile {
  ForwardTile at;
  Sequence sequence;
  KeyTiles tiles;  // that any of its rows sees, worked on from the last to the first
  template <class Shape>
  static __device__ __forceinline__ Fp8Tile of(const Fp8Task& task, int i) {
    const ForwardTile at = forward_tile<Shape::kRows, true>(task, i);
    const Sequence sequence = sequence_of(task, at.batch);
    return {at, sequence, key_tiles_of<Shape::kKeys, true>(task, sequence, at.row, at.row + Shape::kRows - 1)};
  }
};

// byte columns of 16 of row `row` of a panel whose rows have Line bytes
template <int Line>
__device__ __forceinline__ uint32_t swizzled_chunk(uint32_t row, uint32_t chunk) {
  return row * Line + ((chunk ^ (row * Line >> 7 & (Line / 16 - 1))) << 4);
}
// A K-major operand: rows of Line bytes, swizzled, in groups of eight.
template <int Line>
__device__ __forceinline__ uint64_t fp8_operand(uint32_t addr) {
  constexpr uint32_t kSwizzle = Line == 128 ? 1u : 2u;
  return uint64_t(addr >> 4 | 1u << 16) | uint64_t(kSwizzle << 30 | 8 * Line >> 4) << 32;
}

}  // namespace attnjourney
