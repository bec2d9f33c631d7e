// Tile sizes of the kernels for AArch64.
#pragma once
#include <cstdint>

#define ATTN_ISA neon

namespace attnjourney {
namespace {

// 32 registers: 8 x 3 accumulators, 3 vectors of B, broadcasts. By llvm-mca the loops of products reach .98 of the FMA
// bound on Neoverse N1, V1 and V2; 6 x 3 the same but for .86 on V1.
struct Tuning {
  static constexpr int rows = 8, vectors = 3;
  static constexpr int wide_rows = rows, wide_vectors = vectors;
  static constexpr int forward_panels = 4, forward_keys = 144, forward_tiles = 8;  // 48 queries: P is 27 KB
  static constexpr int long_forward_keys = forward_keys;
  static constexpr int pairs_forward_keys = 256;  // 16-bit operands
  static constexpr int pairs_jvp_keys = 128;
  static constexpr int backward_panels = 8, backward_keys = 144, backward_max_tiles = 64;  // 96 queries
  static constexpr int64_t backward_chunk_bytes = 1 << 20;
  static constexpr int64_t linear_chunk = 48;
  static constexpr int linear_rows = 8, linear_vectors = 3;
};

}  // namespace
}  // namespace attnjourney
