// The kernels of the mma.sync forward, and its launch function for one dtype.
#pragma once
#include "cuda/kernels/sm80/forward.cuh"
#include "cuda/launch.h"

namespace attnjourney {

// f<Kernel>() for what takes heads of that size
template <class T, bool Options, bool Paged = false, class F>
void with_sm80_forward(HeadSize size, F&& f) {
  const auto go = [&]<int Dqk, int Dv, int Keys>() {
    using Kernel = Sm80Forward<T, Dqk, Dv, Keys, Options, Paged>;
    static_assert(fits(Kernel::kSmemBytes, true));
    f.template operator()<Kernel>();
  };
  constexpr int kKeys = Paged ? 32 : 64;  // pages' tiles of 64 would spill
  if (size == HeadSize::d64) return go.template operator()<64, 64, 64>();
  if (size == HeadSize::d128) return go.template operator()<128, 128, kKeys>();
  if (size == HeadSize::d192v128) return go.template operator()<192, 128, kKeys>();
  go.template operator()<256, 256, Options ? 16 : 32>();
}

template <class T>
void launch_sm80_forward(ForwardTask task, bool ranged, cudaStream_t stream) {
  with_sm80_forward<T, false>(forward_size(task.head_dim, task.v_head_dim), [&]<class Kernel>() {
    plan_forward(task, Kernel::kRows);
    launch_kernel(ranged ? sm80_forward<Kernel, true> : sm80_forward<Kernel, false>, task.total, Kernel::kThreads,
                  Kernel::kSmemBytes, stream, task);
  });
}

}  // namespace attnjourney
