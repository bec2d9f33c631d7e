// Tile sizes of the kernels for AVX2.
#pragma once
#include <cstdint>

#define ATTN_ISA avx2

namespace attnjourney {
namespace {

// 16 registers: 6 x 2 accumulators, 2 vectors of B, 1 broadcast. Measured: 4x3 -2 %, 3x4 and 2x6 spill.
struct Tuning {
  static constexpr int rows = 6, vectors = 2;
  static constexpr int wide_rows = rows, wide_vectors = vectors;
  static constexpr int forward_panels = 3, forward_keys = 144, forward_tiles = 8;  // 48 queries: P is 27 KB
  static constexpr int long_forward_keys = forward_keys;
  static constexpr int backward_panels = 6, backward_keys = 144, backward_max_tiles = 64;  // 96 queries
  static constexpr int64_t backward_chunk_bytes = 1 << 20;
  static constexpr int64_t linear_chunk = 48;
  static constexpr int linear_rows = 6, linear_vectors = 2;
};

}  // namespace
}  // namespace attnjourney
