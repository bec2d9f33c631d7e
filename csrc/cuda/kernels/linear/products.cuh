// Products of tiles of linear attention, 16 rows by 8 columns a time: on tensor cores in TF32, once for 16-bit inputs
// and in three parts for float32, or by plain multiply and add: float64, and whatever holds an inf or a NaN.
// 16-bit inputs are exact in TF32, and with the state in float32 no sum leaves its range.
#pragma once
#include "row_tiles.cuh"

namespace attnjourney {

// Which products P[row][col] of a chunk with itself count.
struct LinearBand {
  bool whole, upper;  // all; col >= row, else col <= row
  __device__ __forceinline__ bool seen(int row, int col) const { return whole || (upper ? col >= row : col <= row); }
  // whether rows row .. row + 15 see any of the columns col .. col + 7
  __device__ __forceinline__ bool any(int row, int col) const {
    return whole || (upper ? col + 7 >= row : col <= row + 15);
  }
};

template <class T>
struct LinearProducts {
  using Real = typename LinearElement<T>::Real;
  static constexpr bool kTensor = sizeof(Real) == 4;
  static constexpr int kParts = sizeof(T) == 4 ? 3 : 1;   // of a product
  static constexpr bool kRound = kTensor && kParts == 1;  // tiles hold rounded numbers

  // what is put into a tile
  static __device__ __forceinline__ Real stored(Real x) {
    if constexpr (kRound) x = ptx::round_tf32(x);
    return x;
  }

  // A warp's accumulators: element e of acc[i] is row g + e / 2 * 8, column 8 tile(i) + 2 t + e % 2; `more` is one more
  // column of which t = 0 holds the elements 0 and 2.
  template <int Tiles>
  struct Sums {
    Real acc[Tiles][4], more[4];
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        more[e] = Real(0);
#pragma unroll
        for (int i = 0; i < Tiles; i++) acc[i][e] = Real(0);
      }
    }
  };

  struct Parts {
    float high, low;
  };
  static __device__ __forceinline__ Parts split(float x) {
    const float high = ptx::round_tf32(x);
    return {high, ptx::round_tf32(x - high)};
  }

  // d += a b. Tensor cores cut the sums they carry: what three parts are worth is added outside.
  static __device__ __forceinline__ void multiply_parts(float (&d)[4], const float (&high)[4], const float (&low)[4],
                                                        float b0, float b1) {
    const Parts x = split(b0), y = split(b1);
    float part[4] = {};
    ptx::mma_m16n8k8(part, low, x.high, y.high);
    ptx::mma_m16n8k8(part, high, x.low, y.low);
    ptx::mma_m16n8k8(part, high, x.high, y.high);
#pragma unroll
    for (int e = 0; e < 4; e++) d[e] += part[e];
  }

  // sums += sum over k in [begin, end) of a(row, k) b(k, col), rows and columns of the warp's part; begin and end are
  // multiples of 8. `columns(i)`: the first column of tile i; `used(i)`: whether it is wanted. `more(k)`: the further
  // column of b, where `has_more`. RoundB: b is not rounded yet.
  template <bool RoundB, int Tiles, class A, class B, class More, class Columns, class Used>
  static __device__ __forceinline__ void on_tensor_cores(Sums<Tiles>& sums, int begin, int end, A&& a, B&& b,
                                                         bool has_more, More&& more, Columns&& columns, Used&& used) {
    // opaque: addresses kept over several products would spill
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int k = begin; k < end; k += 8) {
      float x[4] = {a(g, k + t), a(g + 8, k + t), a(g, k + t + 4), a(g + 8, k + t + 4)};
      float low[4];
      if constexpr (kParts == 3) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const Parts parts = split(x[e]);
          x[e] = parts.high, low[e] = parts.low;
        }
      }
      const auto add = [&](float (&d)[4], float b0, float b1) {
        if constexpr (kParts == 3) {
          multiply_parts(d, x, low, b0, b1);
        } else {
          if constexpr (RoundB) b0 = ptx::round_tf32(b0), b1 = ptx::round_tf32(b1);
          ptx::mma_m16n8k8(d, x, b0, b1);
        }
      };
#pragma unroll
      for (int i = 0; i < Tiles; i++)
        if (used(i)) add(sums.acc[i], b(k + t, columns(i) + g), b(k + t + 4, columns(i) + g));
      if (has_more) add(sums.more, g == 0 ? more(k + t) : 0.f, g == 0 ? more(k + t + 4) : 0.f);
    }
  }
  // The same sums; seen(row, k) tells which terms there are.
  template <int Tiles, class A, class B, class More, class Columns, class Seen>
  static __device__ __forceinline__ void one_by_one(Sums<Tiles>& sums, int begin, int end, A&& a, B&& b, bool has_more,
                                                    More&& more, Columns&& columns, Seen&& seen) {
    // opaque: addresses kept over several products would spill
    const int lane = ptx::opaque(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int k = begin; k < end; k++)
#pragma unroll 1
      for (int h = 0; h < 2; h++) {
        if (!seen(g + 8 * h, k)) continue;
        const Real x = a(g + 8 * h, k);
        const auto add = [&](Real(&d)[4], Real b0, Real b1) {
          if (h == 0) {
            d[0] += x * b0, d[1] += x * b1;
          } else {
            d[2] += x * b0, d[3] += x * b1;
          }
        };
#pragma unroll
        for (int i = 0; i < Tiles; i++) add(sums.acc[i], b(k, columns(i) + 2 * t), b(k, columns(i) + 2 * t + 1));
        if (has_more) add(sums.more, more(k), Real(0));
      }
  }
};

}  // namespace attnjourney
