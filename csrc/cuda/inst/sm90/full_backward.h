// The launch function of the Hopper backward with options for one dtype.
#pragma once
#include "backward.h"
#include "cuda/kernels/common/mask_tiles.cuh"
#include "cuda/kernels/sm90/full_backward.cuh"

namespace attnjourney {

// option_gradients(): what comes after the kernel, see launch.h
template <class T, class OptionGradients>
void launch_sm90_full_backward(const BackwardTask& p, cudaStream_t stream, OptionGradients&& option_gradients) {
  const auto go = [&]<class S>() {
    launch_backward<S>(p, stream, [&] {
      const Scores& s = p.scores;
      const int64_t item = single_batch_stride(s, s.mask_batch);
      Sm90FullBackwardMaps maps{sm90_backward_maps<S>(p), {}, mask_in_tiles(p), item > 0};
      if (maps.mask_tiles)
        maps.mask = tensor_map(s.mask, {item, s.mask_head, s.mask_row}, item > 0 ? p.batch : 1,
                               s.mask_head > 0 ? p.q_heads : 1, p.q_len, p.kv_len, S::kRows, ptx::is_bf16<T>);
      if (p.key_tiles > 0 && (p.grad_query || p.grad_key || p.grad_value || p.slope_sum || p.mask_gradient.own))
        launch_kernel(sm90_full_backward<S>,
                      int64_t{p.key_tiles} * (p.key_value_sum ? p.q_heads : p.kv_heads) * (p.cu_q ? 1 : p.batch),
                      S::kThreads, S::kSmemBytes, stream, maps, p);
      option_gradients();
    });
  };
  const auto pick = [&]<bool Deterministic>() {
    if (backward_size(p.head_dim, p.v_head_dim) == 64)
      go.template operator()<Sm90FullBackwardShape<T, 64, 128, Deterministic>>();
    else
      go.template operator()<Sm90FullBackwardShape<T, 128, 64, Deterministic>>();
  };
  if (p.turn)
    pick.template operator()<true>();
  else
    pick.template operator()<false>();
}

}  // namespace attnjourney
