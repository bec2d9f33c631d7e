// The launch function of the backward for float or double.
#pragma once
#include "../kernels/backward_heads.cuh"
#include "../kernels/wide_mask_gradient.cuh"
#include "../kernels/wide_passes.cuh"
#include "pick.h"

namespace attnjourney {

template <class Real>
void launch_wide_backward(const BackwardTaskOf<Real>& p, const Device& device, cudaStream_t stream) {
  const int items = p.cu_q ? 1 : p.batch;
  const int64_t rows = int64_t{items} * p.q_heads * p.rows;
  const auto per_head = [&](auto kernel, bool per_item) {
    launch(kernel, int64_t{per_item ? p.batch : 1} * p.q_heads, kPassThreads, kHeadsBytes, stream, p);
  };
  const bool small = device.shared_bytes < kMiddleShared;
  with_wide_backward<Real>(backward_size(p.head_dim, p.v_head_dim), small, [&]<class K>() {
    static_assert(K::kRows == wide_rows(K::kD, sizeof(Real)) && K::kKeys == wide_keys(K::kD, sizeof(Real)));
    const auto pass = [&](auto kernel, int64_t threads) {
      launch(kernel, (threads + kWidePassThreads - 1) / kWidePassThreads, kWidePassThreads, 0, stream, p, K::kD, rows);
    };
    pass(wide_prepare<Real>, 32 * rows);
    if (p.grad_query || p.grad_key || p.grad_value || p.slope_sum)
      launch(wide_backward<K>, int64_t{p.key_tiles} * p.kv_heads * items, K::kThreads, K::kSmemBytes, stream, p);
    if (p.grad_query) pass(wide_query<Real>, rows * (K::kD / kWide<Real>));
  });
  if (p.grad_sinks) per_head(backward_per_head<true, Real>, p.sinks_per_item);
  if (p.grad_slopes) per_head(backward_per_head<false, Real>, p.slopes_per_item);
  using Gradient = WideMaskGradient<Real>;
  if (p.mask_gradient.sum)
    launch(mask_gradient<Gradient, Real>, mask_gradient_blocks<Gradient>(p), Gradient::kThreads, Gradient::kSmemBytes,
           stream, p);
}

}  // namespace attnjourney
