// The gradients of options, after a backward kernel.
#pragma once
#include "backward_task.h"
//
#include "cuda/kernels/common/backward_heads.cuh"
#include "cuda/kernels/common/mask_gradient.cuh"

namespace driver {

// Where the gradient of a floating mask of mask_count elements is, but for its memory.
template <class Real>
attnjourney::MaskGradientOf<Real> mask_gradient_of(const attnjourney::BackwardTaskOf<Real>& p, const Arguments& a) {
  return {nullptr,
          {a["mask_batch"]},
          a["mask_head"],
          a["mask_row"],
          a["mask_col"],
          a["mask_batch"] ? p.batch : 1,
          a["mask_head"] ? p.q_heads : 1,
          nullptr};
}

// The gradients of sinks and slopes [batch, q_heads].
template <class Real>
void head_gradients(attnjourney::BackwardTaskOf<Real> p, const Arguments& a) {
  using namespace attnjourney;
  p.sinks_per_item = p.slopes_per_item = a["per_item"];
  const auto per_head = [&](auto kernel, const char* name, Real*& to) {
    if (!a[name]) return;
    emulator::Buffer<Real> grad(static_cast<size_t>(a["per_item"] ? p.batch : 1) * p.q_heads, name);
    to = grad.data;
    emulator::launch(kernel, dim3(static_cast<unsigned>(grad.size)), dim3(kPassThreads), kHeadsBytes, a.options(), p);
    write(grad);
  };
  per_head(backward_per_head<true, Real>, "sinks", p.grad_sinks);
  per_head(backward_per_head<false, Real>, "slopes", p.grad_slopes);
}

// That of a floating mask by `kernel` on Gradient's tiles.
template <class Gradient, class Task>
void mask_gradient_by(void (*kernel)(Task), Gradient, Task p, const Arguments& a) {
  if (a["mask"] < 2) return;
  emulator::Buffer<std::remove_pointer_t<decltype(p.delta)>> grad(static_cast<size_t>(a["mask_count"]), "grad_mask");
  p.mask_gradient = mask_gradient_of(p, a);
  p.mask_gradient.sum = grad.data;
  emulator::launch(kernel, dim3(static_cast<unsigned>(attnjourney::mask_gradient_blocks<Gradient>(p))),
                   dim3(Gradient::kThreads), Gradient::kSmemBytes, a.options(), p);
  write(grad);
}

// All of them, the mask's where the kernel has not written it to `own`.
template <class Gradient, class Real>
void options_gradients(const attnjourney::BackwardTaskOf<Real>& p, const Arguments& a) {
  using namespace attnjourney;
  head_gradients(p, a);
  if (a["mask"] < 2 || !p.mask_gradient.own) return mask_gradient_by(mask_gradient<Gradient, Real>, Gradient{}, p, a);
  emulator::Buffer<Real> grad(static_cast<size_t>(a["mask_count"]), "grad_mask");
  if constexpr (requires { typename Gradient::T; })
    for (size_t i = 0; i < grad.size; i++)
      grad.data[i] = ptx::to_float(static_cast<const typename Gradient::T*>(p.mask_gradient.own)[i]);
  write(grad);
}

}  // namespace driver
