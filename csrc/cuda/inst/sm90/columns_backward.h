// The launch function of the Hopper backward at head dimension 256 for one dtype.
#pragma once
#include "backward.h"
#include "cuda/kernels/sm90/backward_columns.cuh"

namespace attnjourney {

template <class T>
void launch_sm90_columns_backward(const BackwardTask& task, bool ranged, cudaStream_t stream) {
  const auto go = [&]<bool Deterministic>() {
    using Shape = Sm90BackwardShape<T, 256, 64, Deterministic>;
    launch_sm90_backward_kernel<Shape>(
        task, stream, ranged ? sm90_columns_backward<Shape, true> : sm90_columns_backward<Shape, false>);
  };
  if (task.turn)
    go.template operator()<true>();
  else
    go.template operator()<false>();
}

}  // namespace attnjourney
