// The launch function of the mma.sync forward of more than 256 columns for one dtype.
#pragma once
#include "cuda/kernels/sm80/wide_forward.cuh"
#include "cuda/launch.h"

namespace attnjourney {

template <class T>
void launch_sm80_wide_forward(ForwardTask task, cudaStream_t stream) {
  using Kernel = Sm80Forward512<T>;
  static_assert(fits(Kernel::kSmemBytes, true));
  plan_forward(task, Kernel::kRows);
  launch_kernel(sm80_wide_forward<Kernel>, task.total, Kernel::kThreads, Kernel::kSmemBytes, stream, task);
}

}  // namespace attnjourney
