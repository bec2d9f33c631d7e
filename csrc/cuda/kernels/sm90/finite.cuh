// Numbers that are not finite in tiles that TMA brought, where something is hidden from some rows: such a number counts
// only for the rows whose weight is not 0, so that a NaN in a value whose weight underflows does not show there. That
// is seldom needed: it is looked for by ordinary loads, and multiplied by mma.sync (guarded_mma in common/scores.cuh),
// whose fragments are those of wgmma. Tiles that hide nothing are not looked at, but for K once for a block.
#pragma once
#include "cuda/kernels/common/scores.cuh"
#include "cuda/ptx/sm90.cuh"

namespace attnjourney {

// all ones in the halves that are not 0
__device__ __forceinline__ uint32_t not_zero(uint32_t x) {
  return (((x & 0x7fff7fffu) + 0x7fff7fffu) >> 15 & 0x00010001u) * 0xffffu;
}
// What is not finite in a quarter of a tile; 0: nothing. A warp; the four of a warpgroup take a quarter each.
template <class T, int Bytes>
__device__ __forceinline__ uint32_t not_finite_in(const unsigned char* tile, int quarter) {
  const uint4* at = reinterpret_cast<const uint4*>(tile + quarter * (Bytes / 4)) + threadIdx.x % 32;
  uint32_t bad = 0;
#pragma unroll 2
  for (int i = 0; i < Bytes / 4 / 512; i++) {
    const uint4 x = at[i * 32];
    bad |= not_finite<T>(x.x) | not_finite<T>(x.y) | not_finite<T>(x.z) | not_finite<T>(x.w);
  }
  return bad;
}
template <class T, int Bytes>
__device__ __forceinline__ uint32_t not_finite_in(const unsigned char* tile) {
  return not_finite_in<T, Bytes>(tile, threadIdx.x / 32 % 4);
}
// Is `here` true for any thread of a warpgroup? barrier: free for these 128 threads; flags: eight words of the
// warpgroup's own, used in turns.
__device__ __forceinline__ bool group_any(bool here, uint32_t* flags, int& turn, int barrier) {
  const bool mine = ptx::any(here);
  uint32_t* now = flags + 4 * turn;
  turn ^= 1;
  if (threadIdx.x % 32 == 0) now[threadIdx.x / 32 % 4] = mine;
  ptx::bar_sync(barrier, 128);
  return now[0] | now[1] | now[2] | now[3];
}

// d += A B for one step of 16 rows of B: columns [0, Columns) of a tile in panels of 64 columns, `panel` bytes apart,
// swizzled as TMA does. row: the lane's of the tile.
template <class T, int Columns>
__device__ __forceinline__ void guarded_step(float* d, const uint32_t (&a)[4], uint32_t tile, uint32_t panel,
                                             uint32_t row, uint32_t lane) {
#pragma unroll
  for (int j = 0; j < Columns / 16; j++) {
    const uint32_t chunk = j * 2 + lane / 16;
    uint32_t b[4];
    ptx::ldmatrix_x4_trans(b, tile + chunk / 8 * panel + row * 128 + ((chunk % 8 ^ (row & 7)) << 4));
    float (&d0)[4] = *reinterpret_cast<float (*)[4]>(d + 8 * j),
          (&d1)[4] = *reinterpret_cast<float (*)[4]>(d + 8 * j + 4);
    guarded_mma<T>(d0, d1, a, b);
  }
}

// d += A B with A in registers, Steps steps of 16; a is lost.
template <class T, int Columns, int Steps>
__device__ __forceinline__ void guarded_product(float* d, uint32_t (&a)[Steps][4], uint32_t tile, int panel) {
  const uint32_t lane = ptx::opaque(threadIdx.x) % 32;
#pragma unroll 1
  for (int kk = 0; kk < Steps; kk++) {
    guarded_step<T, Columns>(d, a[0], tile, panel, kk * 16 + lane % 16, lane);
#pragma unroll
    for (int i = 0; i + 1 < Steps; i++)  // the next step's to the front: registers have no index
#pragma unroll
      for (int e = 0; e < 4; e++) a[i][e] = a[i + 1][e];
  }
}

}  // namespace attnjourney
