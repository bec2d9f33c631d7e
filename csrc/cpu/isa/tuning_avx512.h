// Tile sizes of the AVX-512 kernels.
#pragma once
#include <cstdint>

#define ATTN_ISA avx512

namespace attnjourney {
namespace {

// 32 registers: 8 x 3 accumulators, 3 vectors of B, broadcasts. Measured on Zen 5: 12x2 and 6x4 within 3 % below.
struct Tuning {
  static constexpr int rows = 8, vectors = 3;
  static constexpr int wide_rows = 6, wide_vectors = 4;
  static constexpr int forward_panels = 1, forward_keys = 144, forward_tiles = 8;  // 48 queries
  static constexpr int long_forward_keys = 2 * forward_keys;
  static constexpr int pairs_forward_keys = 256;  // 16-bit operands
  static constexpr int pairs_jvp_keys = 128;
  static constexpr int backward_panels = 2, backward_keys = 144, backward_max_tiles = 64;  // 96 queries
  static constexpr int64_t matrix_backward_keys = 128;                                     // by pairs
  static constexpr int64_t backward_chunk_bytes = 1 << 20;
  static constexpr int64_t linear_chunk = 64;
  static constexpr int linear_rows = 6, linear_vectors = 4;  // a chunk's 64 columns at once
};

}  // namespace
}  // namespace attnjourney
