// The Hopper forward where a tile hides some keys and a value is not finite.
#pragma once
#include "finite.cuh"
#include "forward_shape.cuh"

namespace attnjourney {

template <class Shape>
struct Sm90ForwardGuard {
  using T = typename Shape::T;
  // flags: 32 bytes a warpgroup; barriers 1 to 3 are the ping-pong's, with which one turn will do: it has a barrier of
  // the warpgroup for every tile
  static __device__ __forceinline__ bool finite(const unsigned char* value, unsigned char* flags, int& turn) {
    const int group = static_cast<int>(ptx::opaque(threadIdx.x)) / 128 - 1;
    int first = 0;
    return !group_any(not_finite_in<T, Shape::kValueBytes>(value) != 0, reinterpret_cast<uint32_t*>(flags) + 8 * group,
                      Shape::kPingPong ? first : turn, 4 + group);
  }
  // o += P V; the probabilities are lost
  static __device__ __forceinline__ void product(float (&out)[Shape::kDv / 2],
                                                 uint32_t (&weights)[Shape::kKeys / 16][4], uint32_t value) {
    guarded_product<T, Shape::kDv>(out, weights, value, Shape::kKeys * 128);
  }
};

}  // namespace attnjourney
