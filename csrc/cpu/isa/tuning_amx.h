// Tile sizes of the kernels on a matrix unit.
#pragma once
#include <cstdint>

#define ATTN_ISA amx

namespace attnjourney {
namespace {

struct Tuning {
  static constexpr int rows = 8, vectors = 3;
  static constexpr int wide_rows = 6, wide_vectors = 4;
  static constexpr int forward_panels = 2, forward_tiles = 4;  // 96 queries; of a call those of avx512
  static constexpr int64_t matrix_forward_keys = 256;
  static constexpr int backward_panels = 2, backward_keys = 144, backward_max_tiles = 64;  // 96 queries
  static constexpr int64_t matrix_backward_keys = 128;
  static constexpr int64_t backward_chunk_bytes = 1 << 20;
};

}  // namespace
}  // namespace attnjourney
