// From the entry of decoding to its kernels: how a call is cut up, and one launch function per dtype (inst/).
#pragma once
#include <algorithm>

#include "cuda/architectures.h"
#include "cuda/kernels/decode/decode_task.cuh"
#include "cuda/launch.h"

namespace attnjourney {

// What the kernel of a call works on at a time.
struct DecodeTiling {
  int rows, keys;             // of a tile
  int smem_bytes, blocks;     // blocks of a multiprocessor, as far as registers go
  int keys_of_rounds = 1024;  // that a block has at least where there are more blocks than run at once
};

// chunked: the caches' rows are whole 16-byte chunks
using DecodeTilingOf = DecodeTiling (*)(int head_dim, int v_head_dim, int rows, bool chunked);
using DecodeLaunch = void (*)(const DecodeTask&, bool chunked, cudaStream_t);
struct CudaDecode {
  DecodeTilingOf tiling;
  DecodeLaunch launch;  // and the merge, where keys are split
};
extern const CudaDecode sm80_decode_bf16, sm80_decode_fp16, sm80_decode_fp32, sm80_decode_fp64;

// Blocks that share a sequence's keys, from the capacity: lengths are not known here. Enough to fill the GPU, with at
// least 128 keys each; or four rounds of blocks, for lengths that differ, with as many as the kernel says.
inline int decode_splits(int64_t units, int64_t keys, const DecodeTiling& tiling, const Device& device) {
  const int64_t slots = int64_t{device.multiprocessors} *
                        std::clamp(multiprocessor_bytes(device) / (tiling.smem_bytes + 1024), 1, tiling.blocks);
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t fill = std::min(slots / units, up(keys, 128));
  const int64_t rounds = std::min(up(4 * slots, units), keys / tiling.keys_of_rounds);
  return static_cast<int>(std::clamp<int64_t>(std::max(fill, rounds), 1, 512));
}

}  // namespace attnjourney
