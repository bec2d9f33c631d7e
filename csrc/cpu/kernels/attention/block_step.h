// How rows and keys are stepped through with a mask of blocks. Blocks are multiples of 16.
#pragma once
#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

// Rows or keys to take at a time, at most `limit`: in one block, or few whole ones.
ATTN_INLINE int64_t block_step(int64_t size, int64_t limit) {
  if (size <= limit) return max_of(1, limit / 2 / size) * size;
  for (int64_t part = limit / 16 * 16; part >= limit / 2; part -= 16)
    if (size % part == 0) return part;
  return limit / 16 * 16;
}

}  // namespace
}  // namespace attnjourney
