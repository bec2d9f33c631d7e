// The launch function of the derivative in a direction for float or double.
#pragma once
#include "cuda/kernels/fp32/jvp.cuh"
#include "cuda/launch.h"

namespace attnjourney {

template <class Real>
void launch_fp32_jvp(JvpTaskOf<Real> task, cudaStream_t stream) {
  with_size(backward_size(task.head_dim, task.v_head_dim), [&]<int D>() {
    using Kernel = Fp32JvpOf<Real, D>;
    static_assert(fits(Kernel::kSmemBytes, true));
    plan_forward(task, Kernel::kRows, sizeof(Real));
    launch_kernel(fp32_jvp<Kernel>, task.total, Kernel::kThreads, Kernel::kSmemBytes, stream, task);
  });
}

}  // namespace attnjourney
