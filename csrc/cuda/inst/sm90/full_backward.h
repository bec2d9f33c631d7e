// The launch function of the Hopper backward with options for one dtype.
#pragma once
#include "backward.h"
#include "cuda/kernels/common/mask_tiles.cuh"
#include "cuda/kernels/sm90/full_backward_columns.cuh"

namespace attnjourney {

// option_gradients(): what comes after the kernel, see launch.h
template <class T, class OptionGradients>
void launch_sm90_full_backward(const BackwardTask& task, const TileKinds& kinds, cudaStream_t stream,
                               OptionGradients&& option_gradients) {
  const auto go = [&]<class Shape>(void (*kernel)(Sm90FullBackwardMaps, BackwardTask)) {
    launch_backward<Shape>(task, stream, [&] {
      const Scores& s = task.scores;
      const int64_t item = single_batch_stride(s, s.mask_batch);
      Sm90FullBackwardMaps maps{sm90_backward_maps<Shape>(task), {}, mask_in_tiles(task), item > 0, kinds};
      if (maps.mask_tiles)
        maps.mask =
            tensor_map(s.mask, {item, s.mask_head, s.mask_row}, item > 0 ? task.batch : 1,
                       s.mask_head > 0 ? task.q_heads : 1, task.q_len, task.kv_len, Shape::kRows, ptx::is_bf16<T>);
      if (task.key_tiles > 0 &&
          (task.grad_query || task.grad_key || task.grad_value || task.slope_sum || task.mask_gradient.own))
        launch_kernel(kernel,
                      int64_t{task.key_tiles} * (task.key_value_sum ? task.q_heads : task.kv_heads) *
                          (task.cu_q ? 1 : task.batch),
                      Shape::kThreads, Shape::kSmemBytes, stream, maps, task);
      option_gradients();
    });
  };
  const auto pick = [&]<bool Deterministic>() {
    using D64 = Sm90FullBackwardShape<T, 64, 128, Deterministic>;
    using D128 = Sm90FullBackwardShape<T, 128, 64, Deterministic>;
    using D256 = Sm90FullBackwardShape<T, 256, 64, Deterministic>;
    const int size = backward_size(task.head_dim, task.v_head_dim);
    if (size == 64) return go.template operator()<D64>(sm90_full_backward<D64>);
    if (size == 128) return go.template operator()<D128>(sm90_full_backward<D128>);
    go.template operator()<D256>(sm90_full_columns_backward<D256>);
  };
  if (task.turn)
    pick.template operator()<true>();
  else
    pick.template operator()<false>();
}

}  // namespace attnjourney
