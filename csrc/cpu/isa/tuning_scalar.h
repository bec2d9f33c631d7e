// Tile sizes of the kernels for one lane.
#pragma once
#include <cstdint>

#define ATTN_ISA scalar

namespace attnjourney {
namespace {

struct Tuning {
  static constexpr int rows = 4, vectors = 2;
  static constexpr int wide_rows = rows, wide_vectors = vectors;
  static constexpr int forward_panels = 16, forward_keys = 64, forward_tiles = 4;
  static constexpr int long_forward_keys = forward_keys;
  static constexpr int backward_panels = 16, backward_keys = 64, backward_max_tiles = 64;
  static constexpr int64_t backward_chunk_bytes = 1 << 18;
  static constexpr int64_t linear_chunk = 32;
  static constexpr int linear_rows = 4, linear_vectors = 2;
};

}  // namespace
}  // namespace attnjourney
