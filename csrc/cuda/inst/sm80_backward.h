// The launch function of the mma.sync backward for one dtype.
#pragma once
#include "backward_passes.h"
#include "pick.h"

namespace attnjourney {

template <class T>
void launch_sm80_backward(const BackwardTask& p, bool ranged, cudaStream_t stream) {
  const auto go = [&]<class K>() {
    launch_backward<K>(p, stream, [&] {
      launch(ranged ? sm80_backward<K, true> : sm80_backward<K, false>, int64_t{p.key_tiles} * p.kv_heads * p.batch,
             K::kThreads, K::kSmemBytes, stream, p);
    });
  };
  const int size = backward_size(p.head_dim, p.v_head_dim);
  p.turn ? with_sm80_backward<T, true>(size, go) : with_sm80_backward<T, false>(size, go);
}

}  // namespace attnjourney
