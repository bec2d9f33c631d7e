// The launch function of the mma.sync backward for one dtype.
#pragma once
#include "../kernels/sm80_backward.cuh"
#include "backward_passes.h"

namespace attnjourney {

template <class T>
void launch_sm80_backward(const BackwardTask& p, bool ranged, cudaStream_t stream) {
  const auto go = [&]<class K>() {
    launch_backward<K>(p, stream, [&] {
      launch(ranged ? sm80_backward<K, true> : sm80_backward<K, false>, int64_t{p.key_tiles} * p.kv_heads * p.batch,
             K::kThreads, K::kSmemBytes, stream, p);
    });
  };
  const auto pick = [&]<bool Deterministic>() {
    const int size = backward_size(p.head_dim, p.v_head_dim);
    if (size == 64)
      go.template operator()<Sm80Backward<T, 64, 128, 128, Deterministic>>();
    else if (size == 128)
      go.template operator()<Sm80Backward<T, 128, 64, 128, Deterministic>>();
    else
      go.template operator()<Sm80Backward<T, 256, 32, 64, Deterministic>>();
  };
  if (p.turn)
    pick.template operator()<true>();
  else
    pick.template operator()<false>();
}

}  // namespace attnjourney
