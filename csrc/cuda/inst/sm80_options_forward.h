// The launch function of the mma.sync forward with options for one dtype.
#pragma once
#include "../kernels/sm80_forward.cuh"
#include "../launch.h"

namespace attnjourney {

template <class T>
void launch_sm80_options_forward(ForwardTask p, cudaStream_t stream) {
  const auto go = [&]<class K>() {
    plan_forward(p, K::kRows);
    launch(sm80_forward<K, true>, p.total, K::kThreads, K::kSmemBytes, stream, p);
  };
  const int size = forward_size(p.head_dim, p.v_head_dim);
  if (size == 64064) return go.template operator()<Sm80Forward<T, 64, 64, 64, true>>();
  if (size == 128128) return go.template operator()<Sm80Forward<T, 128, 128, 64, true>>();
  if (size == 192128) return go.template operator()<Sm80Forward<T, 192, 128, 64, true>>();
  go.template operator()<Sm80Forward<T, 256, 256, 16, true>>();
}

}  // namespace attnjourney
