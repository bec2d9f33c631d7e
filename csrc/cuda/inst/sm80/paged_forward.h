// The launch function of the mma.sync forward over pages for one dtype.
#pragma once
#include "forward.h"

namespace attnjourney {

template <class T>
void launch_sm80_paged_forward(ForwardTask task, const PagedKeys& pages, cudaStream_t stream) {
  with_sm80_forward<T, true, true>(forward_size(task.head_dim, task.v_head_dim), [&]<class Kernel>() {
    plan_forward(task, Kernel::kRows);
    launch_kernel(sm80_paged_forward<Kernel>, task.total, Kernel::kThreads, Kernel::kSmemBytes, stream, task, pages);
  });
}

}  // namespace attnjourney
