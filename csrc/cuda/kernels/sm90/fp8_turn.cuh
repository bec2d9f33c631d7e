// V^T for wgmma over e4m3, whose operands are K-major alone: three warps turn each tile of V in shared memory. Keys and
// columns come out in an order of their own, which costs nothing: of every 16 keys, place 4 t + i of a row of V^T has
// the keys 2 t, 2 t + 1, 8 + 2 t, 8 + 2 t + 1, which are those that a thread holds of the scores of a row, so that
// weights leave the accumulators as an A operand without an exchange; of every 16 columns, rows n and 8 + n of V^T have
// columns 2 n and 2 n + 1, so that a thread of the output has four adjacent columns.
#pragma once
#include "fp8_shape.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90Fp8Turn {
  static constexpr int kChunks = Shape::kD / 16, kUnits = Shape::kKeys / 32 * kChunks;  // of 32 keys by 16 columns

  // is any of four numbers a NaN? In the highest bits of the bytes
  static __device__ __forceinline__ uint32_t nan_bytes(uint32_t x) {
    return ((x & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  }

  // Units warp, warp + kTurners, ... of a tile; returns whether a number was a NaN, in this lane.
  static __device__ __forceinline__ uint32_t tile(uint32_t value, uint32_t turned, int warp, int lane) {
    constexpr int kLine = Shape::kLine, kPanel = Shape::kKeys * kLine;
    uint32_t nan = 0;
#pragma unroll 2
    for (int unit = warp; unit < kUnits; unit += Shape::kTurners) {
      const int keys = unit / kChunks, chunk = unit % kChunks;
      // eight keys of 16 bytes for each of four matrices of pairs of columns, which come out turned
      uint32_t pairs[4], quads[4];
      const int column = chunk % (kLine / 16), panel = chunk / (kLine / 16) * kPanel;
      ptx::ldmatrix_x4_trans(pairs, value + panel + swizzled_chunk<kLine>(keys * 32 + lane, column));
#pragma unroll
      for (int half = 0; half < 2; half++) {
        quads[2 * half] = ptx::select_bytes<0x6420>(pairs[2 * half], pairs[2 * half + 1]);      // even columns
        quads[2 * half + 1] = ptx::select_bytes<0x7531>(pairs[2 * half], pairs[2 * half + 1]);  // odd ones
        nan |= nan_bytes(pairs[2 * half]) | nan_bytes(pairs[2 * half + 1]);
      }
      const int row = chunk * 16 + lane % 16, place = keys * 2 + lane / 16;
      ptx::stmatrix_x4(turned + swizzled_chunk<Shape::kKeys>(row, place), quads);
    }
    return nan;
  }

  static __device__ __forceinline__ void run(uint32_t smem, unsigned char* base, const Sm90Fp8Barriers<Shape>& barriers,
                                             int count, int warp, int lane) {
#pragma unroll 1
    for (int number = 0; number < count; number++) {
      const int stage = number % Shape::kStages;
      wait_full<Shape>(barriers.v_full, number);
      wait_empty<Shape>(barriers.turned_empty, number);  // @turned_free
      const uint32_t nan = tile(smem + Shape::kValueAt + stage * Shape::kKeyBytes,
                                smem + Shape::kTurnedAt + stage * Shape::kKeyBytes, warp, lane);
      const bool any = ptx::any(nan != 0);
      __syncwarp();  // @value_read: by every lane, before one releases the stage
      if (lane == 0) {
        reinterpret_cast<uint32_t*>(base + Shape::kNanAt)[4 * stage + warp] = any;
        ptx::mbarrier_arrive(barriers.v_empty + 8 * stage);
      }
      ptx::fence_proxy_async();  // @turned_visible: to wgmma
      ptx::mbarrier_arrive(barriers.turned_full + 8 * stage);
    }
  }
};

}  // namespace attnjourney
