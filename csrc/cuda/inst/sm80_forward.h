// The launch function of the mma.sync forward for one dtype.
#pragma once
#include "../kernels/sm80_forward.cuh"
#include "../launch.h"

namespace attnjourney {

template <class T>
void launch_sm80_forward(ForwardTask p, bool ranged, cudaStream_t stream) {
  const auto go = [&]<class K>() {
    plan_forward(p, K::kRows);
    launch(ranged ? sm80_forward<K, true> : sm80_forward<K, false>, p.total, K::kThreads, K::kSmemBytes, stream, p);
  };
  const int size = forward_size(p.head_dim, p.v_head_dim);
  if (size == 64064) return go.template operator()<Sm80Forward<T, 64, 64, 64>>();
  if (size == 128128) return go.template operator()<Sm80Forward<T, 128, 128, 64>>();
  if (size == 192128) return go.template operator()<Sm80Forward<T, 192, 128, 64>>();
  go.template operator()<Sm80Forward<T, 256, 256, 32>>();
}

}  // namespace attnjourney
