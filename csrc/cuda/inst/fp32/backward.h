// The launch function of the backward for float or double.
#pragma once
#include <type_traits>

#include "cuda/kernels/common/backward_heads.cuh"
#include "cuda/kernels/fp32/backward.cuh"
#include "cuda/kernels/fp32/mask_gradient.cuh"
#include "cuda/kernels/fp32/passes.cuh"
#include "cuda/launch.h"

namespace attnjourney {

template <class Kernel>
void launch_fp32_backward_of(const BackwardTaskOf<typename Kernel::Real>& task, cudaStream_t stream) {
  using Real = typename Kernel::Real;
  const int items = task.cu_q ? 1 : task.batch;
  const int64_t rows = int64_t{items} * task.q_heads * task.rows;
  const auto pass = [&](auto kernel, int64_t threads) {
    launch_kernel(kernel, (threads + kFp32PassThreads - 1) / kFp32PassThreads, kFp32PassThreads, 0, stream, task,
                  Kernel::kD, rows);
  };
  pass(fp32_prepare<Real>, 32 * rows);
  if (task.grad_query || task.grad_key || task.grad_value || task.slope_sum)
    launch_kernel(fp32_backward<Kernel>, int64_t{task.key_tiles} * task.kv_heads * items, Kernel::kThreads,
                  Kernel::kSmemBytes, stream, task);
  if (task.grad_query) pass(fp32_query<Real>, rows * (Kernel::kD / kFp32Lanes<Real>));
}

template <class Kernel>
constexpr bool has_planned_tiles(bool small) {
  return Kernel::kRows == fp32_rows(Kernel::kD, sizeof(typename Kernel::Real), small) &&
         Kernel::kKeys == fp32_keys(Kernel::kD, sizeof(typename Kernel::Real));
}

template <class Real>
void launch_head_gradients(const BackwardTaskOf<Real>& task, cudaStream_t stream) {
  const auto per_head = [&](auto kernel, bool per_item) {
    launch_kernel(kernel, int64_t{per_item ? task.batch : 1} * task.q_heads, kPassThreads, kHeadsBytes, stream, task);
  };
  if (task.grad_sinks) per_head(backward_per_head<true, Real>, task.sinks_per_item);
  if (task.grad_slopes) per_head(backward_per_head<false, Real>, task.slopes_per_item);
}

template <class Real>
void launch_fp32_backward(const BackwardTaskOf<Real>& task, const Device& device, cudaStream_t stream) {
  with_size(backward_size(task.head_dim, task.v_head_dim), [&]<int D>() {
    using Usual = Fp32BackwardOf<Real, D>;
    using Small = std::conditional_t<fits(Usual::kSmemBytes, true), Usual, Fp32BackwardSmall<Real, D>>;
    static_assert(fits(Usual::kSmemBytes, false) && fits(Small::kSmemBytes, true));
    static_assert(has_planned_tiles<Usual>(false) && has_planned_tiles<Small>(true));
    device.small() ? launch_fp32_backward_of<Small>(task, stream) : launch_fp32_backward_of<Usual>(task, stream);
  });
  launch_head_gradients(task, stream);
  using Gradient = Fp32MaskGradient<Real>;
  static_assert(fits(Gradient::kSmemBytes, true));
  if (task.mask_gradient.sum)
    launch_kernel(mask_gradient<Gradient, Real>, mask_gradient_blocks<Gradient>(task), Gradient::kThreads,
                  Gradient::kSmemBytes, stream, task);
}

}  // namespace attnjourney
