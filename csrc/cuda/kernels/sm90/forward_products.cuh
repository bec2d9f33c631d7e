// The two products of the 16-bit forward on Hopper. Tiles in shared memory lie in panels of 64 columns.
#pragma once
#include "forward_shape.cuh"

namespace attnjourney {

// An operand with 128-byte swizzle: groups of 8 rows 1024 bytes apart, panels of 64 columns `panel` bytes apart.
__device__ __forceinline__ uint64_t swizzled_operand(uint32_t addr, int panel) {
  return uint64_t(addr >> 4 | uint32_t(panel >> 4) << 16) | uint64_t(1u << 30 | 1024 >> 4) << 32;
}

template <class Shape>
struct Sm90ForwardProducts {
  using T = typename Shape::T;
  // issues s = Q K^T
  static __device__ __forceinline__ void scores(float (&scores_)[Shape::kKeys / 2], uint32_t query, uint32_t key) {
    const uint64_t q = swizzled_operand(query, 0), k = swizzled_operand(key, 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < Shape::kDqk / 16; kk++)
      ptx::wgmma_ss<T, Shape::kKeys, 0, 0>(scores_, q + kk / 4 * (64 * 128 / 16) + kk % 4 * 2,
                                           k + kk / 4 * (Shape::kKeys * 128 / 16) + kk % 4 * 2, kk > 0);
    ptx::wgmma_commit();
  }
  // issues o += P V
  static __device__ __forceinline__ void output(float (&out)[Shape::kDv / 2],
                                                const uint32_t (&weights)[Shape::kKeys / 16][4], uint32_t value) {
    const uint64_t v = swizzled_operand(value, Shape::kKeys * 128);
    ptx::wgmma_fence();
    constexpr int kColumns = Shape::kDv < 128 ? Shape::kDv : 128;  // of a product
    constexpr int kStep = kColumns / 64 * (Shape::kKeys * 128 / 16);
#pragma unroll
    for (int kk = 0; kk < Shape::kKeys / 16; kk++)
#pragma unroll
      for (int c = 0; c < Shape::kDv / kColumns; c++)
        ptx::wgmma_rs<T, kColumns, 1>(reinterpret_cast<float (&)[kColumns / 2]>(out[c * kColumns / 2]), weights[kk],
                                      v + c * kStep + kk * (16 * 128 / 16), true);
    ptx::wgmma_commit();
  }
};

}  // namespace attnjourney
