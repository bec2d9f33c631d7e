// Which kernel takes which head dimensions: f<Kernel>() for it. size: as forward_size, backward_size say; small: the
// GPU's blocks may have 99 KB of shared memory.
#pragma once
#include "../kernels/sm80_backward.cuh"
#include "../kernels/sm80_forward.cuh"
#include "../kernels/wide_backward.cuh"
#include "../kernels/wide_forward.cuh"
#include "../launch.h"

namespace attnjourney {

template <class T, bool Options, class F>
auto with_sm80_forward(int size, F&& f) {
  if (size == 64064) return f.template operator()<Sm80Forward<T, 64, 64, 64, Options>>();
  if (size == 128128) return f.template operator()<Sm80Forward<T, 128, 128, 64, Options>>();
  if (size == 192128) return f.template operator()<Sm80Forward<T, 192, 128, 64, Options>>();
  return f.template operator()<Sm80Forward<T, 256, 256, Options ? 16 : 32, Options>>();
}

template <class T, bool Deterministic, class F>
auto with_sm80_backward(int size, F&& f) {
  if (size == 64) return f.template operator()<Sm80Backward<T, 64, 128, 128, Deterministic>>();
  if (size == 128) return f.template operator()<Sm80Backward<T, 128, 64, 128, Deterministic>>();
  return f.template operator()<Sm80Backward<T, 256, 32, 64, Deterministic>>();
}
template <class T, bool Deterministic, class F>
auto with_sm80_options_backward(int size, bool small, F&& f) {
  if (small && size == 64) return f.template operator()<Sm80Backward<T, 64, 128, 64, Deterministic, true, 1>>();
  if (small && size == 128) return f.template operator()<Sm80Backward<T, 128, 64, 64, Deterministic, true, 1>>();
  if (size == 64) return f.template operator()<Sm80Backward<T, 64, 128, 64, Deterministic, true>>();
  if (size == 128) return f.template operator()<Sm80Backward<T, 128, 64, 64, Deterministic, true>>();
  return f.template operator()<Sm80Backward<T, 256, 32, 64, Deterministic, true>>();
}

template <class Real, class F>
auto with_wide_forward(int size, F&& f) {
  if (size == 64) return f.template operator()<WideForwardOf<Real, 64>>();
  if (size == 128) return f.template operator()<WideForwardOf<Real, 128>>();
  return f.template operator()<WideForwardOf<Real, 256>>();
}

template <class Real, class F>
auto with_wide_backward(int size, bool small, F&& f) {
  const auto pick = [&]<int D>() {
    using Usual = WideBackwardOf<Real, D>;
    using Small = WideBackwardSmall<Real, D>;
    if constexpr (Usual::kSmemBytes > kSmallShared && Small::kSmemBytes <= kSmallShared)
      if (small) return f.template operator()<Small>();
    return f.template operator()<Usual>();
  };
  if (size == 64) return pick.template operator()<64>();
  if (size == 128) return pick.template operator()<128>();
  return pick.template operator()<256>();
}

}  // namespace attnjourney
