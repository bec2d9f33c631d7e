// The launch function of the Hopper backward at head dimensions of 129 to 192 for one dtype.
#pragma once
#include "backward.h"
#include "cuda/kernels/sm90/backward_parts.cuh"

namespace attnjourney {

template <class T>
void launch_sm90_parts_backward(const BackwardTask& task, bool ranged, cudaStream_t stream) {
  const auto go = [&]<bool Deterministic>() {
    using Shape = Sm90BackwardShape<T, 192, 64, Deterministic>;
    launch_sm90_backward_kernel<Shape>(task, stream,
                                       ranged ? sm90_parts_backward<Shape, true> : sm90_parts_backward<Shape, false>);
  };
  if (task.turn)
    go.template operator()<true>();
  else
    go.template operator()<false>();
}

}  // namespace attnjourney
