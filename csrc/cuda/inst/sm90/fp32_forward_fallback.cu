#include "cuda/kernels/fp32/forward.cuh"
#include "cuda/launch.h"

void attnjourney::fp32_forward_fallback_float(ForwardTask task, const uint32_t* needs_fallback, const Device& device,
                                              cudaStream_t stream) {
  const auto go = [&]<class K>() {
    plan_forward(task, K::kRows, 4);
    const int blocks = K::kBlocks * device.multiprocessors;
    launch_kernel(fp32_forward_fallback<K>, task.total < blocks ? task.total : blocks, K::kThreads, K::kSmemBytes,
                  stream, task, needs_fallback);
  };
  if (backward_size(task.head_dim, task.v_head_dim) == 64) return go.template operator()<Fp32ForwardOf<float, 64>>();
  go.template operator()<Fp32ForwardOf<float, 128>>();
}
