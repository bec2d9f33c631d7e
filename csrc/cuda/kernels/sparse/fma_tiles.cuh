// Products of token-sparse attention with ordinary arithmetic: float and double, and 16-bit numbers whose rows are not
// whole chunks of 16 bytes. Tiles are in the type of the arithmetic.
#pragma once
#include "task.cuh"

namespace attnjourney {

template <class T_>
struct SparseFma {
  using T = T_;
  using Real = Compute<T>;
  static constexpr int kWarps = 4, kThreads = 128, kStages = 1;
  static constexpr int kBlocks = 1;  // of a multiprocessor, at least; or ptxas spills to have room for more
  static constexpr int kSize = sizeof(Real) == 8 ? 8 : 16;  // keys of a tile, rows at most
  static constexpr int kWide = 4 * kThreads * 4 / (kSize * kSize);
  static constexpr __host__ __device__ int width(int dim) { return (dim + kWide - 1) / kWide * kWide; }
  struct alignas(16) Four {
    Real x[4];
  };

  // Rows of up to W numbers, four more from one to the next than a multiple of kWide: others would be in the same
  // banks.
  template <int W>
  struct Tile {
    Real* data;
    int pitch;
    __device__ __forceinline__ Tile(unsigned char* data_, int dim)
        : data(reinterpret_cast<Real*>(data_)), pitch(width(dim) + 4) {}
    static constexpr __host__ __device__ int bytes(int rows, int dim) {
      return rows * (width(dim) + 4) * static_cast<int>(sizeof(Real));
    }
    // One row by one warp, zeros behind it.
    __device__ __forceinline__ void load(int row, const T* from, bool valid, int dim) const {
      Real* const to = data + row * pitch;
      for (int d = threadIdx.x % 32; d < pitch - 4; d += 32)
        to[d] = valid && d < dim ? Real(ptx::to_float(from[d])) : Real(0);
    }
  };

  template <int N>
  static constexpr int kPitch = N + 2;
  // to[M][N] = A B^T over `dim` columns: a thread takes two rows and two keys of a slice of the columns.
  template <int M, int N, int First, int Wa, int Wb>
  static __device__ __forceinline__ void products(Real* to, const Tile<Wa>& a, const Tile<Wb>& b, int dim) {
    constexpr int kSlices = kWide / 4;  // threads that share four products: the same bits in tiles of any size
    if (threadIdx.x >= M * N / 4 * kSlices) return;
    const int slice = threadIdx.x % kSlices, row = threadIdx.x / kSlices % (M / 2) * 2,
              key = threadIdx.x / kSlices / (M / 2) * 2;
    Real sum[2][2] = {};
    for (int d = 4 * slice; d < dim; d += 4 * kSlices) {
      Four x[2], y[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        x[i] = *reinterpret_cast<const Four*>(a.data + (row + i) * a.pitch + d);
        y[i] = *reinterpret_cast<const Four*>(b.data + (key + i) * b.pitch + d);
      }
#pragma unroll
      for (int e = 0; e < 4; e++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i / 2][i % 2] += x[i / 2].x[e] * y[i % 2].x[e];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      Real product = sum[i / 2][i % 2];
#pragma unroll
      for (int w = kSlices / 2; w > 0; w /= 2) product += ptx::shfl_xor(product, w);
      if (i % kSlices == slice) to[(row + i / 2) * kPitch<N> + key + i % 2] = product;
    }
  }

  // [summed over][row of the sum]
  template <int M, int N, bool OverRows>
  struct Weights {
    unsigned char* data;
    static constexpr int kBytes = M * N * static_cast<int>(sizeof(Real)), kWidth = OverRows ? N : M;
    __device__ __forceinline__ void put(int row, int key, Real x, Real y) const {
      Real* const to = reinterpret_cast<Real*>(data);
      to[OverRows ? row * N + key : key * M + row] = x;
      to[OverRows ? row * N + key + 1 : (key + 1) * M + row] = y;
    }
    __device__ __forceinline__ const Real* of(int k) const { return reinterpret_cast<const Real*>(data) + k * kWidth; }
  };

  // Sums [M][W] in registers: a thread has columns of its own. What a tile adds is summed by itself first: sums that
  // start from the total would round every product at its size.
  template <int M, int W>
  struct Sums {
    static constexpr int kColumns = (W + kThreads - 1) / kThreads;
    Real x[kColumns][M] = {};
    __device__ __forceinline__ void shrink(const Real* factors) {
#pragma unroll
      for (int i = 0; i < kColumns * M; i++) x[i / M][i % M] *= factors[i % M];
    }
    template <int Wm, int Wn, bool OverRows, int Wb>
    __device__ __forceinline__ void add(const Weights<Wm, Wn, OverRows>& weights, const Tile<Wb>& b, int dim,
                                        bool guarded) {
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        const int column = c * kThreads + threadIdx.x;
        if (column >= dim) break;
        Real sum[M] = {};
#pragma unroll 2
        for (int k = 0; k < (OverRows ? Wm : Wn); k++) {
          const Real y = b.data[k * b.pitch + column];
          const Real* const weight = weights.of(k);
#pragma unroll
          for (int r = 0; r < M; r++) sum[r] += guarded && weight[r] == Real(0) ? Real(0) : weight[r] * y;
        }
#pragma unroll
        for (int r = 0; r < M; r++) x[c][r] += sum[r];
      }
    }
    template <class F>
    __device__ __forceinline__ void each(int dim, F&& f) const {
#pragma unroll
      for (int i = 0; i < kColumns * M; i++) {
        const int column = i / M * kThreads + threadIdx.x;
        const Real one[1] = {x[i / M][i % M]};
        if (column < dim) f(i % M, column, one);
      }
    }
  };
  template <class To>
  static __device__ __forceinline__ void store(To* to, const Real (&x)[1], Real factor) {
    store_one(to, x[0] * factor);
  }
  static __device__ __forceinline__ void commit() {}
  static __device__ __forceinline__ void wait() {}
};

}  // namespace attnjourney
