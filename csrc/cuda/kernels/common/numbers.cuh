// Numbers of any dtype for the kernels that work row by row: loads and stores of one or of 16 bytes of them, sums over
// a warp. Arithmetic is in float, for double in double.
#pragma once
#include <cmath>

#include "cuda/ptx/sm80.cuh"

namespace attnjourney {

enum class Number : int { fp32, fp64, bf16, fp16 };
inline constexpr int bytes_of(Number n) { return n == Number::fp64 ? 8 : n == Number::fp32 ? 4 : 2; }

template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T>
inline constexpr int kVector = 16 / sizeof(T);  // numbers in 16 bytes

template <class T>
__device__ __forceinline__ void store_one(T* p, Compute<T> x) {
  if constexpr (sizeof(T) == 2)
    *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(ptx::pack2<T>(x, 0.f));
  else
    *p = x;
}

template <class T>
struct alignas(16) Chunk {
  T x[kVector<T>];
};

// V numbers from p on; V > 1: p at a multiple of 16 bytes, and so is the end
template <class T, int V>
__device__ __forceinline__ void load_numbers(Compute<T> (&x)[V], const T* p) {
  if constexpr (V == 1) {
    x[0] = ptx::to_float(*p);
  } else {
    static_assert(V % kVector<T> == 0);
#pragma unroll
    for (int c = 0; c < V; c += kVector<T>) {
      if constexpr (sizeof(T) == 2) {
        const uint4 v = *reinterpret_cast<const uint4*>(p + c);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float2 two = ptx::unpack2<T>(words[i]);
          x[c + 2 * i] = two.x, x[c + 2 * i + 1] = two.y;
        }
      } else {
        const Chunk<T> v = *reinterpret_cast<const Chunk<T>*>(p + c);
#pragma unroll
        for (int i = 0; i < kVector<T>; i++) x[c + i] = v.x[i];
      }
    }
  }
}
template <class T, int V>
__device__ __forceinline__ void store_numbers(T* p, const Compute<T> (&x)[V]) {
  if constexpr (V == 1) {
    store_one(p, x[0]);
  } else {
    static_assert(V % kVector<T> == 0);
#pragma unroll
    for (int c = 0; c < V; c += kVector<T>) {
      if constexpr (sizeof(T) == 2) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = ptx::pack2<T>(x[c + 2 * i], x[c + 2 * i + 1]);
        *reinterpret_cast<uint4*>(p + c) = uint4{words[0], words[1], words[2], words[3]};
      } else {
        Chunk<T> v;
#pragma unroll
        for (int i = 0; i < kVector<T>; i++) v.x[i] = x[c + i];
        *reinterpret_cast<Chunk<T>*>(p + c) = v;
      }
    }
  }
}

// of all 32 lanes, the same bits in each
template <class C>
__device__ __forceinline__ C warp_sum(C x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += ptx::shfl_xor(x, mask);
  return x;
}

}  // namespace attnjourney
