// The launch function of the mma.sync backward of more than 256 columns for one dtype.
#pragma once
#include "cuda/inst/backward_passes.h"
#include "cuda/kernels/sm80/wide_backward.cuh"

namespace attnjourney {

// option_gradients: of sinks, slopes and a floating mask
template <class T>
void launch_sm80_wide_backward(const BackwardTask& task, void (*option_gradients)(const BackwardTask&, cudaStream_t),
                               cudaStream_t stream) {
  const auto go = [&]<class Kernel>() {
    static_assert(fits(Kernel::kSmemBytes, true));
    launch_backward<Kernel>(task, stream, [&] {
      if (task.grad_query || task.grad_key || task.grad_value || task.slope_sum)
        launch_kernel(sm80_wide_backward<Kernel>,
                      int64_t{task.key_tiles} * task.kv_heads * (task.cu_q ? 1 : task.batch), Kernel::kThreads,
                      Kernel::kSmemBytes, stream, task);
      option_gradients(task, stream);
    });
  };
  task.turn ? go.template operator()<Sm80Backward512<T, true>>() : go.template operator()<Sm80Backward512<T, false>>();
}

}  // namespace attnjourney
