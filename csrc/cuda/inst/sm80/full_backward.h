// The launch function of the mma.sync backward with options for one dtype.
#pragma once
#include <type_traits>

#include "cuda/inst/backward_passes.h"
#include "cuda/kernels/common/backward_heads.cuh"
#include "cuda/kernels/sm80/backward.cuh"
#include "cuda/kernels/sm80/mask_gradient.cuh"

namespace attnjourney {

// f<Kernel>() for what takes these head dims; size: as backward_size says; small: Device::small()
template <class T, bool Deterministic, class F>
void with_sm80_full_backward(int size, bool small, F&& f) {
  with_size(size, [&]<int D>() {
    using Usual = Sm80Backward<T, D, backward_rows(D), backward_keys(D, true, false), Deterministic, true>;
    using Small = Sm80BackwardSmall<T, D, Deterministic>;
    static_assert(fits(Usual::kSmemBytes, false) && fits(Small::kSmemBytes, true));
    static_assert(Small::kRows == backward_rows(D) && Small::kKeys == backward_keys(D, true, true));
    small ? f.template operator()<Small>() : f.template operator()<Usual>();
  });
}

// The gradients of sinks, of slopes and of a floating mask, after the main kernel.
template <class T>
void launch_option_gradients(const BackwardTask& task, cudaStream_t stream) {
  const auto per_head = [&](auto kernel, bool per_item) {
    launch_kernel(kernel, int64_t{per_item ? task.batch : 1} * task.q_heads, kPassThreads, kHeadsBytes, stream, task);
  };
  if (task.grad_sinks) per_head(backward_per_head<true, float>, task.sinks_per_item);
  if (task.grad_slopes) per_head(backward_per_head<false, float>, task.slopes_per_item);
  if (!task.mask_gradient.sum) return;
  const int size = backward_size(task.head_dim, task.v_head_dim);
  with_size(size < 256 ? size : 256, [&]<int D>() {  // D = 256 takes more, too
    using Gradient = Sm80MaskGradient<T, D>;
    static_assert(fits(Gradient::kSmemBytes, true));
    launch_kernel(mask_gradient<Gradient, float>, mask_gradient_blocks<Gradient>(task), Gradient::kThreads,
                  Gradient::kSmemBytes, stream, task);
  });
}

template <class T>
void launch_sm80_full_backward(const BackwardTask& task, const Device& device, cudaStream_t stream) {
  const auto go = [&]<class Kernel>() {
    launch_backward<Kernel>(task, stream, [&] {
      if (task.grad_query || task.grad_key || task.grad_value || task.slope_sum)
        launch_kernel(sm80_backward<Kernel, true>,
                      int64_t{task.key_tiles} * task.kv_heads * (task.cu_q ? 1 : task.batch), Kernel::kThreads,
                      Kernel::kSmemBytes, stream, task);
      launch_option_gradients<T>(task, stream);
    });
  };
  const int size = backward_size(task.head_dim, task.v_head_dim);
  task.turn ? with_sm80_full_backward<T, true>(size, device.small(), go)
            : with_sm80_full_backward<T, false>(size, device.small(), go);
}

}  // namespace attnjourney
