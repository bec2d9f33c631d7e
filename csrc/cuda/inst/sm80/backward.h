// The launch function of the mma.sync backward for one dtype: not where shared memory is small.
#pragma once
#include "cuda/inst/backward_passes.h"
#include "cuda/kernels/sm80/backward.cuh"

namespace attnjourney {

template <class T, bool Deterministic>
void launch_sm80_backward(const BackwardTask& p, bool ranged, cudaStream_t stream) {
  with_size(backward_size(p.head_dim, p.v_head_dim), [&]<int D>() {
    using K = Sm80Backward<T, D, backward_rows(D), backward_keys(D, false, false), Deterministic>;
    static_assert(fits(K::kSmemBytes, false));
    launch_backward<K>(p, stream, [&] {
      launch_kernel(ranged ? sm80_backward<K, true> : sm80_backward<K, false>,
                    int64_t{p.key_tiles} * p.kv_heads * p.batch, K::kThreads, K::kSmemBytes, stream, p);
    });
  });
}

template <class T>
void launch_sm80_backward(const BackwardTask& p, bool ranged, cudaStream_t stream) {
  p.turn ? launch_sm80_backward<T, true>(p, ranged, stream) : launch_sm80_backward<T, false>(p, ranged, stream);
}

}  // namespace attnjourney
