// Warps of the Hopper forward that look at V where a tile hides keys from some rows: the consumers, whose tensor cores
// would stand still meanwhile, read one word of each. A tile of 128 keys takes three warps some 22 loads of 512 bytes.
#pragma once
#include "finite.cuh"
#include "forward_shape.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90ForwardScouts {
  using Barriers = Sm90ForwardBarriers<Shape>;
  // of a stage: x: 1: look at it, 0: nothing is hidden, -1: there are no more tiles; then what each warp has found
  static __device__ __forceinline__ int4& words(unsigned char* base, int stage) {
    return reinterpret_cast<int4*>(base + Shape::kFlagsAt)[stage];
  }

  static __device__ __forceinline__ void run(unsigned char* base, const Barriers& barriers) {
    const int scout = ptx::uniform(threadIdx.x / 32) - 1, lane = threadIdx.x % 32;
    for (int count = 0;; count++) {
      const int stage = count % Shape::kStages;
      ptx::mbarrier_wait(barriers.v_full + 8 * stage, count / Shape::kStages & 1);  // @value_landed
      const int look = words(base, stage).x;
      if (look < 0) break;
      uint32_t bad = 0;
      if (look > 0) {
        const uint4* const at =
            reinterpret_cast<const uint4*>(base + Shape::kValueAt + stage * Shape::kValueBytes) + lane;
#pragma unroll 4
        for (int i = scout; i < Shape::kValueBytes / 512; i += kScoutWarps) {
          const uint4 x = at[i * 32];
          bad |= not_finite<T>(x.x) | not_finite<T>(x.y) | not_finite<T>(x.z) | not_finite<T>(x.w);
        }
      }
      const bool any = ptx::any(bad != 0);
      __syncwarp();  // @tile_looked_at: no lane reads on, nor waits for this phase
      if (lane == 0) {
        reinterpret_cast<int*>(&words(base, stage))[1 + scout] = any;
        ptx::mbarrier_arrive(barriers.v_seen + 8 * stage);
        ptx::mbarrier_arrive(barriers.v_empty + 8 * stage);
      }
    }
  }

  // by a consumer, of V tile `count`, of which something is hidden
  static __device__ __forceinline__ bool found(unsigned char* base, const Barriers& barriers, int count) {
    const int stage = count % Shape::kStages;
    ptx::mbarrier_wait(barriers.v_seen + 8 * stage, count / Shape::kStages & 1);  // @values_seen
    const int4 x = words(base, stage);
    __syncwarp();  // before one lane releases the stage for all
    return x.y | x.z | x.w;
  }

 private:
  using T = typename Shape::T;
};

}  // namespace attnjourney
