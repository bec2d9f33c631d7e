// The launch function of the mma.sync forward for one dtype.
#pragma once
#include "pick.h"

namespace attnjourney {

template <class T>
void launch_sm80_forward(ForwardTask p, bool ranged, cudaStream_t stream) {
  with_sm80_forward<T, false>(forward_size(p.head_dim, p.v_head_dim), [&]<class K>() {
    plan_forward(p, K::kRows);
    launch(ranged ? sm80_forward<K, true> : sm80_forward<K, false>, p.total, K::kThreads, K::kSmemBytes, stream, p);
  });
}

}  // namespace attnjourney
