// The launch function of the forward for float or double.
#pragma once
#include "../kernels/wide_forward.cuh"
#include "../launch.h"

namespace attnjourney {

template <class Real>
void launch_wide_forward(ForwardTaskOf<Real> p, cudaStream_t stream) {
  const auto go = [&]<class K>() {
    plan_forward(p, K::kRows, sizeof(Real));
    launch(wide_forward<K>, p.total, K::kThreads, K::kSmemBytes, stream, p);
  };
  const int size = backward_size(p.head_dim, p.v_head_dim);
  if (size == 64) return go.template operator()<WideForwardOf<Real, 64>>();
  if (size == 128) return go.template operator()<WideForwardOf<Real, 128>>();
  go.template operator()<WideForwardOf<Real, 256>>();
}

}  // namespace attnjourney
