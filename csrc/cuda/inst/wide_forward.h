// The launch function of the forward for float or double.
#pragma once
#include "pick.h"

namespace attnjourney {

template <class Real>
void launch_wide_forward(ForwardTaskOf<Real> p, cudaStream_t stream) {
  with_wide_forward<Real>(backward_size(p.head_dim, p.v_head_dim), [&]<class K>() {
    plan_forward(p, K::kRows, sizeof(Real));
    launch(wide_forward<K>, p.total, K::kThreads, K::kSmemBytes, stream, p);
  });
}

}  // namespace attnjourney
