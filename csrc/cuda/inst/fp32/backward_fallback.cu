#include "cuda/kernels/fp32/backward.cuh"
#include "cuda/launch.h"

void attnjourney::fp32_backward_fallback_float(const BackwardTask& task, const uint32_t* needs_fallback,
                                               const Device& device, cudaStream_t stream) {
  const auto go = [&]<class Kernel>() {
    const unsigned tiles = static_cast<unsigned>(int64_t{task.key_tiles} * task.kv_heads * task.batch);
    const auto held = static_cast<unsigned>(device.multiprocessors);
    launch_kernel(fp32_backward_fallback<Kernel>, task.turn || tiles < held ? tiles : held, Kernel::kThreads,
                  Kernel::kSmemBytes, stream, task, needs_fallback, tiles);
  };
  if (backward_size(task.head_dim, task.v_head_dim) == 64) return go.template operator()<Fp32BackwardOf<float, 64>>();
  if (device.small()) return go.template operator()<Fp32BackwardSmall<float, 128>>();
  go.template operator()<Fp32BackwardOf<float, 128>>();
}
