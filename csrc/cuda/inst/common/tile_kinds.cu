#include "cuda/kernels/common/tile_kinds.cuh"

#include "cuda/launch.h"

void attnjourney::sm80_tile_kinds(const SequenceTask& task, const TileKinds& k, int keys, cudaStream_t stream) {
  const int threads = task.scores.mask_kind == MaskElement::blocks ? 32 : kKindsThreads;
  const auto blocks = static_cast<int64_t>(k.count());
  if (keys == 64)
    launch_kernel(tile_kinds<64>, blocks, threads, kKindsBytes, stream, task, k);
  else
    launch_kernel(tile_kinds<128>, blocks, threads, kKindsBytes, stream, task, k);
}
