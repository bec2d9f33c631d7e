// The launch function of the mma.sync derivative in a direction for one dtype.
#pragma once
#include "cuda/kernels/sm80/jvp.cuh"
#include "cuda/launch.h"

namespace attnjourney {

template <class T>
void launch_sm80_jvp(JvpTask task, cudaStream_t stream) {
  with_size(backward_size(task.head_dim, task.v_head_dim), [&]<int D>() {
    using Kernel = Sm80JvpOf<T, D>;
    static_assert(fits(Kernel::kSmemBytes, true));
    plan_forward(task, Kernel::kRows);
    launch_kernel(sm80_jvp<Kernel>, task.total, Kernel::kThreads, Kernel::kSmemBytes, stream, task);
  });
}

}  // namespace attnjourney
