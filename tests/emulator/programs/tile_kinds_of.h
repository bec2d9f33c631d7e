// The pass over a mask that comes before a Hopper kernel with options.
#pragma once
#include "emulator/machine/driver.h"
//
#include "cuda/kernels/common/tile_kinds.cuh"

namespace driver {

// rows x Keys: a tile
template <int Keys>
struct TileKindsOf {
  attnjourney::TileKinds kinds;
  emulator::Buffer<uint2> bits;
  TileKindsOf(const attnjourney::SequenceTask& p, int q_heads, int rows, const emulator::Options& options)
      : kinds(attnjourney::plan_tile_kinds(p, q_heads, rows, Keys)), bits(kinds.count(), "bits") {
    if (bits.size == 0) return;
    kinds.bits = bits.data;
    const bool blocks = p.scores.mask_kind == attnjourney::MaskElement::blocks;
    emulator::launch(attnjourney::tile_kinds<Keys>, dim3(static_cast<unsigned>(bits.size)),
                     dim3(blocks ? 32 : attnjourney::kKindsThreads), attnjourney::kKindsBytes, options, p, kinds);
  }
};

}  // namespace driver
