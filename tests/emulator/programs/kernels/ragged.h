// The kernel of ragged.cpp: what each group of blocks has of all sequences, [group][batch, tile, ... of its begin, of
// its end].
#pragma once
#include "cuda/kernels/decode/ragged_shares.cuh"

namespace attnjourney {

constexpr int kTileKeys = 64;

template <class Task>
__global__ void ragged_shares(const Task task, int* cuts) {
  const RaggedShare share = ragged_share<kTileKeys>(task, blockIdx.x, reinterpret_cast<int*>(ptx::dynamic_smem()));
  if (threadIdx.x > 0) return;
  int* const to = cuts + 4 * blockIdx.x;
  to[0] = share.begin.batch, to[1] = share.begin.tile, to[2] = share.end.batch, to[3] = share.end.tile;
}

INSTANCE(ragged_shares<DecodeTask>);

}  // namespace attnjourney
