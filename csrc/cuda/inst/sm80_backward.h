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
    if (backward_size(p.head_dim, p.v_head_dim) == 64)
      go.template operator()<Sm80Backward<T, 64, 128, backward_keys, Deterministic>>();
    else
      go.template operator()<Sm80Backward<T, 128, 64, backward_keys, Deterministic>>();
  };
  if (p.turn)
    pick.template operator()<true>();
  else
    pick.template operator()<false>();
}

}  // namespace attnjourney
