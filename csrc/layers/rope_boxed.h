// The operators rope and rope_ over a device's rotation: to be registered with TORCH_BOX.
#pragma once
#include "rope.h"

namespace attnjourney {

template <RotaryKernel rotary>
struct RopeOperators {
  static Tensor out_of_place(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
    return rope(rotary, x, cos, sin, interleaved, inverse);
  }
  static void in_place(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
    rope_in_place(rotary, x, cos, sin, interleaved);
  }
};

}  // namespace attnjourney
