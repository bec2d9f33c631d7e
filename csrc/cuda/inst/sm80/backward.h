// The launch function of the mma.sync backward for one dtype: not where shared memory is small.
#pragma once
#include "cuda/inst/backward_passes.h"
#include "cuda/kernels/sm80/backward.cuh"

namespace attnjourney {

template <class T, bool Deterministic>
void launch_sm80_backward(const BackwardTask& task, bool ranged, cudaStream_t stream) {
  with_size(backward_size(task.head_dim, task.v_head_dim), [&]<int D>() {
    using Kernel = Sm80Backward<T, D, backward_rows(D), backward_keys(D, false, false), Deterministic>;
    static_assert(fits(Kernel::kSmemBytes, false));
    launch_backward<Kernel>(task, stream, [&] {
      launch_kernel(ranged ? sm80_backward<Kernel, true> : sm80_backward<Kernel, false>,
                    int64_t{task.key_tiles} * task.kv_heads * task.batch, Kernel::kThreads, Kernel::kSmemBytes, stream,
                    task);
    });
  });
}

template <class T>
void launch_sm80_backward(const BackwardTask& task, bool ranged, cudaStream_t stream) {
  task.turn ? launch_sm80_backward<T, true>(task, ranged, stream)
            : launch_sm80_backward<T, false>(task, ranged, stream);
}

}  // namespace attnjourney
