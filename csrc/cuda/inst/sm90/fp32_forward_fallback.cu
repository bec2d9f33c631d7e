#include "cuda/kernels/fp32/forward.cuh"
#include "cuda/launch.h"

void attnjourney::sm90_wide_forward_rest_fp32(ForwardTask p, const uint32_t* rare, const Device& device,
                                              cudaStream_t stream) {
  const auto go = [&]<class K>() {
    plan_forward(p, K::kRows, 4);
    const int blocks = K::kBlocks * device.multiprocessors;
    launch(wide_forward_rest<K>, p.total < blocks ? p.total : blocks, K::kThreads, K::kSmemBytes, stream, p, rare);
  };
  if (backward_size(p.head_dim, p.v_head_dim) == 64) return go.template operator()<WideForwardOf<float, 64>>();
  go.template operator()<WideForwardOf<float, 128>>();
}
