// Products of token-sparse attention by mma.sync, for 16-bit numbers in whole chunks of 16 bytes.
#pragma once
#include "cuda/kernels/common/scores.cuh"
#include "task.cuh"

namespace attnjourney {

template <class T_, int Warps>
struct SparseMma {
  using T = T_;
  using Real = float;
  static constexpr int kWarps = Warps, kThreads = 32 * Warps, kStages = 2;
  static constexpr int kBlocks = 0;  // of a multiprocessor, at least; 0: not said

  // Rows of W numbers in shared memory, chunks in an order in which no two of 8 rows are in the same banks.
  template <int W>
  struct Tile {
    static_assert(W % 64 == 0);
    uint32_t at;
    __device__ __forceinline__ Tile(unsigned char* data, int) : at(ptx::smem_addr(data)) {}
    static constexpr __host__ __device__ int bytes(int rows, int) { return rows * W * 2; }
    __device__ __forceinline__ uint32_t chunk(int row, int c) const {
      return at + row * (W * 2) + ((c ^ (row & 7)) << 4);
    }
    // Starts the copy of one row by one warp; zeros where it is not valid, and behind it up to whole 32 columns.
    __device__ __forceinline__ void load(int row, const T* from, bool valid, int dim) const {
      const int chunks = (dim + 31) / 32 * 4;
      for (int c = threadIdx.x % 32; c < chunks; c += 32) {
        const bool inside = valid && c * 8 < dim;
        ptx::cp_async_16(chunk(row, c), from + (inside ? c * 8 : 0), inside);
      }
    }
  };

  // to[M][N] = A B^T over `dim` columns. Warps from `First` on take the tiles.
  template <int N>
  static constexpr int kPitch = N + 8;
  template <int M, int N, int First, int Wa, int Wb>
  static __device__ __forceinline__ void products(float* to, const Tile<Wa>& a, const Tile<Wb>& b, int dim) {
    constexpr int kAll = M / 16 * (N / 8), kPer = kAll > kWarps ? kAll / kWarps : 1, kShare = N / 8 / kPer;
    constexpr int kDepth = (Wa < Wb ? Wa : Wb) / 32;
    static_assert(N / 8 % kPer == 0 && kAll / kPer <= kWarps);
    const int lane = threadIdx.x % 32, job = (threadIdx.x / 32 + First) % kWarps;
    if (job >= kAll / kPer) return;
    const int row0 = job / kShare * 16, key0 = job % kShare * (8 * kPer);
    float sum[kPer][4] = {};
#pragma unroll 2
    for (int kk = 0; kk < kDepth; kk++) {
      if (kk * 32 >= dim) break;
      uint32_t x[2][4];
      ptx::ldmatrix_x4(x[0], a.chunk(row0 + lane % 16, kk * 4 + lane / 16));
      ptx::ldmatrix_x4(x[1], a.chunk(row0 + lane % 16, kk * 4 + 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < kPer; j++) {
        uint32_t y[4];
        ptx::ldmatrix_x4(y, b.chunk(key0 + j * 8 + lane % 8, kk * 4 + lane / 8));
        ptx::mma_m16n8k16<T>(sum[j], x[0], y[0], y[1]);
        ptx::mma_m16n8k16<T>(sum[j], x[1], y[2], y[3]);
      }
    }
#pragma unroll
    for (int j = 0; j < kPer; j++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        *reinterpret_cast<float2*>(to + (row0 + lane / 4 + 8 * h) * kPitch<N> + key0 + j * 8 + lane % 4 * 2) =
            float2{sum[j][2 * h], sum[j][2 * h + 1]};
  }

  // [M][N] for the second product, which sums over keys, or over rows where OverRows.
  template <int M, int N, bool OverRows>
  struct Weights {
    static constexpr int kRow = N * 2 + 16;
    unsigned char* data;
    static constexpr int kBytes = M * kRow;
    __device__ __forceinline__ void put(int row, int key, float x, float y) const {  // keys `key` (even) and the next
      *reinterpret_cast<uint32_t*>(data + row * kRow + key * 2) = ptx::pack2<T>(x, y);
    }
    // the fragment of 16 rows of the sum, from `row` on, and numbers 16 k on of what is summed over
    __device__ __forceinline__ void fragment(uint32_t (&a)[4], int row, int k) const {
      const int lane = threadIdx.x % 32;
      const uint32_t at = ptx::smem_addr(data);
      if constexpr (OverRows)
        ptx::ldmatrix_x4_trans(a, at + (k * 16 + lane / 16 * 8 + lane % 8) * kRow + (row + lane / 8 % 2 * 8) * 2);
      else
        ptx::ldmatrix_x4(a, at + (row + lane % 16) * kRow + (k * 2 + lane / 16) * 16);
    }
  };

  // Sums [M][W] in registers: a warp has 16 rows, and of the columns every kShare-th 16.
  template <int M, int W>
  struct Sums {
    static constexpr int kShare = kWarps / (M / 16), kGroups = (W / 16 + kShare - 1) / kShare;
    static_assert(M % 16 == 0 && kWarps % (M / 16) == 0);
    float x[kGroups][2][4] = {};

    static __device__ __forceinline__ int row0() { return threadIdx.x / 32 / kShare * 16; }
    static __device__ __forceinline__ int column(int i) { return (threadIdx.x / 32 % kShare + i * kShare) * 16; }

    __device__ __forceinline__ void shrink(const float* factors) {
      const int row = row0() + threadIdx.x % 32 / 4;
      const float f[2] = {factors[row], factors[row + 8]};
      if (!ptx::any(f[0] != 1.f || f[1] != 1.f)) return;
#pragma unroll
      for (int i = 0; i < 8 * kGroups; i++) x[i / 8][i / 4 % 2][i % 4] *= f[i / 2 % 2];
    }
    // += weights B; guarded: weights may be 0 beside numbers that are not finite
    template <int Wm, int Wn, bool OverRows, int Wb>
    __device__ __forceinline__ void add(const Weights<Wm, Wn, OverRows>& weights, const Tile<Wb>& b, int dim,
                                        bool guarded) {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int k = 0; k < (OverRows ? Wm : Wn) / 16; k++) {
        uint32_t a[4];
        weights.fragment(a, row0(), k);
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
          if (column(i) >= dim) break;
          uint32_t y[4];
          ptx::ldmatrix_x4_trans(y, b.chunk(k * 16 + lane % 16, column(i) / 8 + lane / 16));
          if (!guarded || !ptx::any(!all_finite<T>(y)))
            pair_mma<T>(x[i][0], x[i][1], a, y);
          else
            guarded_mma<T>(x[i][0], x[i][1], a, y);
        }
      }
    }
    // f(row, column, two neighbours) for all columns below dim
    template <class F>
    __device__ __forceinline__ void each(int dim, F&& f) const {
      const int lane = threadIdx.x % 32, row = row0() + lane / 4;
#pragma unroll
      for (int i = 0; i < 4 * kGroups; i++) {
        const int at = column(i / 4) + i / 2 % 2 * 8 + lane % 4 * 2, h = i % 2;
        const float pair[2] = {x[i / 4][i / 2 % 2][2 * h], x[i / 4][i / 2 % 2][2 * h + 1]};
        if (at < dim) f(row + 8 * h, at, pair);
      }
    }
  };
  static __device__ __forceinline__ void store(T* to, const float (&x)[2], float factor) {
    *reinterpret_cast<uint32_t*>(to) = ptx::pack2<T>(x[0] * factor, x[1] * factor);
  }
  static __device__ __forceinline__ void store(float* to, const float (&x)[2], float factor) {
    *reinterpret_cast<float2*>(to) = float2{x[0] * factor, x[1] * factor};
  }
  static __device__ __forceinline__ void commit() { ptx::cp_async_commit(); }
  static __device__ __forceinline__ void wait() { ptx::cp_async_wait<0>(); }
};

}  // namespace attnjourney
