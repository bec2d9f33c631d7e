// The kinds of a mask's tiles for one call, in memory of its own.
#pragma once
#include "cuda/device.h"
#include "cuda/kernels/common/tile_kinds.cuh"

namespace attnjourney {

// rows x keys: a tile, keys 64 or 128. Holds the memory in `keep`.
inline TileKinds tile_kinds(const SequenceTask& p, int q_heads, int rows, int keys, const Tensor& like,
                            cudaStream_t stream, OptionalTensor& keep) {
  TileKinds k = plan_tile_kinds(p, q_heads, rows, keys);
  if (k.count() == 0) return k;
  keep = aten::empty(like, {static_cast<int64_t>(k.count()), 8}, ScalarType::Byte);
  k.bits = static_cast<uint2*>(keep->data_ptr());
  sm80_tile_kinds(p, k, keys, stream);
  return k;
}

}  // namespace attnjourney
