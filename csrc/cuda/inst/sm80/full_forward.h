// The launch function of the mma.sync forward with options for one dtype.
#pragma once
#include "forward.h"

namespace attnjourney {

template <class T>
void launch_sm80_full_forward(ForwardTask task, cudaStream_t stream) {
  with_sm80_forward<T, true>(forward_size(task.head_dim, task.v_head_dim), [&]<class K>() {
    plan_forward(task, K::kRows);
    launch_kernel(sm80_forward<K, true>, task.total, K::kThreads, K::kSmemBytes, stream, task);
  });
}

}  // namespace attnjourney
