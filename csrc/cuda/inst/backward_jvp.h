// The launches of the derivative of attention's backward in a direction.
#pragma once
#include <algorithm>

#include "cuda/kernels/common/backward_jvp_mask.cuh"
#include "cuda/kernels/common/backward_jvp_passes.cuh"
#include "cuda/launch.h"

namespace attnjourney {

inline void head_gradients(const BackwardTaskOf<float>& p, cudaStream_t s) { fp32_head_gradients_float(p, s); }
inline void head_gradients(const BackwardTaskOf<double>& p, cudaStream_t s) { fp32_head_gradients_double(p, s); }

template <class Math>
void launch_backward_jvp(BackwardJvpTaskOf<typename Math::Real> task, cudaStream_t stream) {
  using Real = typename Math::Real;
  using Kernel = BackwardJvp<Math>;
  using Mask = BackwardJvpMask<Math>;
  static_assert(fits(Kernel::kSmemBytes, true) && fits(Mask::kSmemBytes, true));
  const int64_t rows = int64_t{task.cu_q ? 1 : task.batch} * task.q_heads * task.rows;
  launch_kernel(backward_jvp_prepare<typename Math::T, Real>, (rows + kChangePassRows - 1) / kChangePassRows,
                kChangePassThreads, 0, stream, task, rows);
  plan_operands(task);
  const auto go = [&](Gradient gradient) {
    plan_gradient(task, gradient, Kernel::kColumns, Math::kSumSlices);
    launch_kernel(backward_jvp<Kernel>, task.column_blocks * OwnTile::count(task, task.by_keys(), Kernel::kOwn),
                  Kernel::kThreads, Kernel::smem_bytes(task.own_places), stream, task);
  };
  if (task.grad_query || task.slope_sum) go(Gradient::query);
  if (task.grad_key) go(Gradient::key);
  if (task.grad_value) go(Gradient::value);
  head_gradients(by_queries(task), stream);
  if (!task.mask_gradient.sum) return;
  plan_gradient(task, Gradient::query, Kernel::kColumns, Math::kSumSlices);
  launch_kernel(backward_jvp_mask<Mask>, mask_gradient_blocks<Mask>(task), Mask::kThreads, Mask::kSmemBytes, stream,
                task);
}

}  // namespace attnjourney
