// The Hopper forward where a tile hides some keys and a value is not finite.
#pragma once
#include "sm90_finite.cuh"
#include "sm90_forward_shape.cuh"

namespace attnjourney {

template <class S>
struct Sm90ForwardGuard {
  using T = typename S::T;
  // group: the consumer warpgroup's number; barriers 1 to 3 are the ping-pong's
  static __device__ __forceinline__ bool finite(const unsigned char* value, uint32_t* flags, int& turn, int group) {
    return !group_any(not_finite_in<T, S::kValueBytes>(value) != 0, flags, turn, 4 + group);
  }
  // o += P V; the probabilities are lost
  static __device__ __forceinline__ void product(float (&o)[S::kDv / 2], uint32_t (&p)[S::kKeys / 16][4],
                                                 uint32_t value) {
    guarded_product<T, S::kDv>(o, p, value, S::kKeys * 128);
  }
};

}  // namespace attnjourney
