#include "cuda/kernels/fp32/forward.cuh"
#include "cuda/launch.h"

void attnjourney::fp32_forward_fallback_float(ForwardTask task, const uint32_t* needs_fallback, const Device& device,
                                              cudaStream_t stream) {
  const auto go = [&]<class Kernel>() {
    plan_forward(task, Kernel::kRows, 4);
    const int blocks = Kernel::kBlocks * device.multiprocessors;
    launch_kernel(fp32_forward_fallback<Kernel>, task.total < blocks ? task.total : blocks, Kernel::kThreads,
                  Kernel::kSmemBytes, stream, task, needs_fallback);
  };
  if (backward_size(task.head_dim, task.v_head_dim) == 64) return go.template operator()<Fp32ForwardOf<float, 64>>();
  go.template operator()<Fp32ForwardOf<float, 128>>();
}
