#include "cuda/layers/rows.h"

void attnjourney::sm80_rotary(const RotaryTask& task, Number n, bool vectors, cudaStream_t stream) {
  with_number(n, [&]<class T>() {
    const auto go = [&]<int V>() {
      launch_kernel(rotary<T, V>, rotary_blocks(task, V), kRotaryThreads, 0, stream, task);
    };
    if (vectors)
      go.template operator()<kVector<T>>();
    else
      go.template operator()<1>();
  });
}
