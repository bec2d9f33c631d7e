// The launch function of the forward over pages for float or double.
#pragma once
#include "cuda/kernels/fp32/forward.cuh"
#include "cuda/launch.h"

namespace attnjourney {

template <class Real>
void launch_fp32_paged_forward(ForwardTaskOf<Real> task, const PagedKeys& pages, cudaStream_t stream) {
  with_size(backward_size(task.head_dim, task.v_head_dim), [&]<int D>() {
    using Kernel = Fp32ForwardPaged<Real, D>;
    static_assert(fits(Kernel::kSmemBytes, true));
    plan_forward(task, Kernel::kRows, sizeof(Real));
    launch_kernel(fp32_paged_forward<Kernel>, task.total, Kernel::kThreads, Kernel::kSmemBytes, stream, task, pages);
  });
}

}  // namespace attnjourney
