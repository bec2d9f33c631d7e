#include "cuda/kernels/fp32/forward.cuh"
#include "cuda/launch.h"

void attnjourney::fp32_forward_fallback_float(ForwardTask p, const uint32_t* rare, const Device& device,
                                              cudaStream_t stream) {
  const auto go = [&]<class K>() {
    plan_forward(p, K::kRows, 4);
    const int blocks = K::kBlocks * device.multiprocessors;
    launch_kernel(fp32_forward_fallback<K>, p.total < blocks ? p.total : blocks, K::kThreads, K::kSmemBytes, stream, p,
                  rare);
  };
  if (backward_size(p.head_dim, p.v_head_dim) == 64) return go.template operator()<Fp32ForwardOf<float, 64>>();
  go.template operator()<Fp32ForwardOf<float, 128>>();
}
