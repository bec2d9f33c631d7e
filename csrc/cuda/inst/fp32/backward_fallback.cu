#include "cuda/kernels/fp32/backward.cuh"
#include "cuda/launch.h"

void attnjourney::fp32_backward_fallback_float(const BackwardTask& p, const uint32_t* rare, const Device& device,
                                               cudaStream_t stream) {
  const auto go = [&]<class K>() {
    const unsigned tiles = static_cast<unsigned>(int64_t{p.key_tiles} * p.kv_heads * p.batch);
    const auto held = static_cast<unsigned>(device.multiprocessors);
    launch_kernel(fp32_backward_fallback<K>, p.turn || tiles < held ? tiles : held, K::kThreads, K::kSmemBytes, stream,
                  p, rare, tiles);
  };
  if (backward_size(p.head_dim, p.v_head_dim) == 64) return go.template operator()<Fp32BackwardOf<float, 64>>();
  if (device.small()) return go.template operator()<Fp32BackwardSmall<float, 128>>();
  go.template operator()<Fp32BackwardOf<float, 128>>();
}
