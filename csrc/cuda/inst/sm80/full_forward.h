// The launch function of the mma.sync forward with options for one dtype.
#pragma once
#include "forward.h"

namespace attnjourney {

template <class T>
void launch_sm80_full_forward(ForwardTask task, cudaStream_t stream) {
  with_sm80_forward<T, true>(forward_size(task.head_dim, task.v_head_dim), [&]<class Kernel>() {
    plan_forward(task, Kernel::kRows);
    launch_kernel(sm80_forward<Kernel, true>, task.total, Kernel::kThreads, Kernel::kSmemBytes, stream, task);
  });
}

}  // namespace attnjourney
