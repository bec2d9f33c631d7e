#include "cuda/kernels/common/clear_tails.cuh"

#include "cuda/launch.h"

void attnjourney::sm80_clear_tails(const Tails& tails, cudaStream_t stream) {
  launch_kernel(clear_tails, kTails * kTailBlocks, kTailThreads, 0, stream, tails);
}
