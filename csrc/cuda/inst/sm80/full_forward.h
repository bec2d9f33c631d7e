// The launch function of the mma.sync forward with options for one dtype.
#pragma once
#include "forward.h"

namespace attnjourney {

template <class T>
void launch_sm80_full_forward(ForwardTask p, cudaStream_t stream) {
  with_sm80_forward<T, true>(forward_size(p.head_dim, p.v_head_dim), [&]<class K>() {
    plan_forward(p, K::kRows);
    launch_kernel(sm80_forward<K, true>, p.total, K::kThreads, K::kSmemBytes, stream, p);
  });
}

}  // namespace attnjourney
