// The launch function of the backward for float or double.
#pragma once
#include <type_traits>

#include "cuda/kernels/common/backward_heads.cuh"
#include "cuda/kernels/fp32/backward.cuh"
#include "cuda/kernels/fp32/mask_gradient.cuh"
#include "cuda/kernels/fp32/passes.cuh"
#include "cuda/launch.h"

namespace attnjourney {

template <class K>
void launch_fp32_backward_of(const BackwardTaskOf<typename K::Real>& p, cudaStream_t stream) {
  using Real = typename K::Real;
  const int items = p.cu_q ? 1 : p.batch;
  const int64_t rows = int64_t{items} * p.q_heads * p.rows;
  const auto pass = [&](auto kernel, int64_t threads) {
    launch_kernel(kernel, (threads + kFp32PassThreads - 1) / kFp32PassThreads, kFp32PassThreads, 0, stream, p, K::kD,
                  rows);
  };
  pass(fp32_prepare<Real>, 32 * rows);
  if (p.grad_query || p.grad_key || p.grad_value || p.slope_sum)
    launch_kernel(fp32_backward<K>, int64_t{p.key_tiles} * p.kv_heads * items, K::kThreads, K::kSmemBytes, stream, p);
  if (p.grad_query) pass(fp32_query<Real>, rows * (K::kD / kFp32Lanes<Real>));
}

template <class K>
constexpr bool has_planned_tiles(bool small) {
  return K::kRows == fp32_rows(K::kD, sizeof(typename K::Real), small) &&
         K::kKeys == fp32_keys(K::kD, sizeof(typename K::Real));
}

template <class Real>
void launch_fp32_backward(const BackwardTaskOf<Real>& p, const Device& device, cudaStream_t stream) {
  with_size(backward_size(p.head_dim, p.v_head_dim), [&]<int D>() {
    using Usual = Fp32BackwardOf<Real, D>;
    using Small = std::conditional_t<fits(Usual::kSmemBytes, true), Usual, Fp32BackwardSmall<Real, D>>;
    static_assert(fits(Usual::kSmemBytes, false) && fits(Small::kSmemBytes, true));
    static_assert(has_planned_tiles<Usual>(false) && has_planned_tiles<Small>(true));
    device.small() ? launch_fp32_backward_of<Small>(p, stream) : launch_fp32_backward_of<Usual>(p, stream);
  });
  const auto per_head = [&](auto kernel, bool per_item) {
    launch_kernel(kernel, int64_t{per_item ? p.batch : 1} * p.q_heads, kPassThreads, kHeadsBytes, stream, p);
  };
  if (p.grad_sinks) per_head(backward_per_head<true, Real>, p.sinks_per_item);
  if (p.grad_slopes) per_head(backward_per_head<false, Real>, p.slopes_per_item);
  using Gradient = Fp32MaskGradient<Real>;
  static_assert(fits(Gradient::kSmemBytes, true));
  if (p.mask_gradient.sum)
    launch_kernel(mask_gradient<Gradient, Real>, mask_gradient_blocks<Gradient>(p), Gradient::kThreads,
                  Gradient::kSmemBytes, stream, p);
}

}  // namespace attnjourney
