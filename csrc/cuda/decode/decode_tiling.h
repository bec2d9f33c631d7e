// How decoding is cut up: tiles, and blocks that share the keys of a sequence.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/sizes.h"

namespace attnjourney {

// What the kernel of a call works on at a time.
struct DecodeTiling {
  int rows, keys;             // of a tile
  int smem_bytes, blocks;     // blocks of a multiprocessor, as far as registers go
  int keys_of_rounds = 1024;  // that a block has at least where there are more blocks than run at once
};

// Blocks that share a sequence's keys, from the capacity: lengths are not known here. Enough to fill the GPU, with at
// least 128 keys each; or four rounds of blocks, for lengths that differ, with as many as the kernel says.
inline int decode_splits(int64_t units, int64_t keys, const DecodeTiling& tiling, const Device& device) {
  const int64_t slots = int64_t{device.multiprocessors} *
                        std::clamp(device.multiprocessor_bytes / (tiling.smem_bytes + 1024), 1, tiling.blocks);
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t fill = std::min(slots / units, up(keys, 128));
  const int64_t rounds = std::min(up(4 * slots, units), keys / tiling.keys_of_rounds);
  return static_cast<int>(std::clamp<int64_t>(std::max(fill, rounds), 1, 512));
}

}  // namespace attnjourney
