// The launch function of the forward for float or double.
#pragma once
#include <type_traits>

#include "cuda/kernels/fp32/forward.cuh"
#include "cuda/launch.h"

namespace attnjourney {

template <class Real>
void launch_fp32_forward(ForwardTaskOf<Real> task, const Device& device, cudaStream_t stream) {
  const auto go = [&]<class Kernel>() {
    plan_forward(task, Kernel::kRows, sizeof(Real));
    launch_kernel(fp32_forward<Kernel>, task.total, Kernel::kThreads, Kernel::kSmemBytes, stream, task);
  };
  with_size(backward_size(task.head_dim, task.v_head_dim), [&]<int D>() {
    using Usual = Fp32ForwardOf<Real, D>;
    using Small = std::conditional_t<fits(Usual::kSmemBytes, true), Usual, Fp32ForwardSmall<Real, D>>;
    static_assert(fits(Usual::kSmemBytes, false) && fits(Small::kSmemBytes, true));
    device.small() ? go.template operator()<Small>() : go.template operator()<Usual>();
  });
}

}  // namespace attnjourney
