// The launch function of the mma.sync backward with options for one dtype.
#pragma once
#include "../kernels/backward_heads.cuh"
#include "../kernels/sm80_mask_gradient.cuh"
#include "backward_passes.h"
#include "pick.h"

namespace attnjourney {

template <class T>
void launch_sm80_options_backward(const BackwardTask& p, const Device& device, cudaStream_t stream) {
  const auto per_head = [&](auto kernel, bool per_item) {
    launch(kernel, int64_t{per_item ? p.batch : 1} * p.q_heads, kPassThreads, kHeadsBytes, stream, p);
  };
  const auto go = [&]<class K>() {
    launch_backward<K>(p, stream, [&] {
      if (p.grad_query || p.grad_key || p.grad_value || p.slope_sum)
        launch(sm80_backward<K, true>, int64_t{p.key_tiles} * p.kv_heads * (p.cu_q ? 1 : p.batch), K::kThreads,
               K::kSmemBytes, stream, p);
      if (p.grad_sinks) per_head(backward_per_head<true, float>, p.sinks_per_item);
      if (p.grad_slopes) per_head(backward_per_head<false, float>, p.slopes_per_item);
      using Gradient = Sm80MaskGradient<T, K::kD>;
      if (p.mask_gradient.sum)
        launch(mask_gradient<Gradient, float>, mask_gradient_blocks<Gradient>(p), Gradient::kThreads,
               Gradient::kSmemBytes, stream, p);
    });
  };
  const int size = backward_size(p.head_dim, p.v_head_dim);
  const bool small = device.shared_bytes < kMiddleShared;
  p.turn ? with_sm80_options_backward<T, true>(size, small, go) : with_sm80_options_backward<T, false>(size, small, go);
}

}  // namespace attnjourney
