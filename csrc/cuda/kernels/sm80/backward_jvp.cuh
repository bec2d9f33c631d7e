// The derivative of attention's backward in a direction for 16-bit numbers: its products on mma.sync.
#pragma once
#include "cuda/kernels/common/backward_jvp.cuh"
#include "row_products.cuh"

namespace attnjourney {

template <class T_>
struct Sm80BackwardJvpMath {
  using T = T_;
  using Real = float;
  static constexpr int kOthers = 32, kSumSlices = 2;
  using RowProducts = Sm80RowProducts<T, 64, kOthers>;
  using Scores = typename RowProducts::Weights;
  using Columns = typename RowProducts::Sums;
  struct Exact {};

  static __device__ __forceinline__ int at(int row, int chunk) {
    return static_cast<int>(RowProducts::chunk_at(0, row, chunk));
  }
  static __device__ __forceinline__ void add(Scores& s, const unsigned char* own, const unsigned char* other, int row0,
                                             int lane) {
    RowProducts::add_scores(s, ptx::smem_addr(own), ptx::smem_addr(other), row0, 0, lane);
  }
  static __device__ __forceinline__ void add_exact(Scores& s, Exact&, const unsigned char* own,
                                                   const unsigned char* other, int row0, int, bool, int lane) {
    add(s, own, other, row0, lane);
  }
  static __device__ __forceinline__ void sum(Columns& d, const Scores& weights, const unsigned char* other, bool hides,
                                             uint32_t*, int&, int lane) {
    RowProducts::add_values(d, weights, ptx::smem_addr(other), hides, 0, lane, lane);
  }
  // row 8 h of a thread, columns from `first` on
  static __device__ __forceinline__ void write(T* to, const Columns& d, int h, float scale, int first, int dim,
                                               int lane) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (first + j * 8 >= dim) break;
      *reinterpret_cast<uint32_t*>(to + first + j * 8 + lane % 4 * 2) =
          ptx::pack2<T>(d[j][2 * h] * scale, d[j][2 * h + 1] * scale);
    }
  }
};

}  // namespace attnjourney
