// Masks of blocks: which blocks a range of rows sees.
#pragma once
#include "attention/params.h"
#include "block_step.h"

namespace attnjourney {
namespace {

// The first block of a row of blocks at or past key block `from`: its place, or the row's end.
ATTN_INLINE int32_t find_block(const BlockRows& blocks, int64_t row_block, int64_t from) {
  int32_t low = blocks.offsets[row_block], high = blocks.offsets[row_block + 1];
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (blocks.index[middle] < from)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// the first key at or past `from` in a block that any row of [first, last] sees any of; `none` where there is none
ATTN_NOINLINE int64_t next_block_key(const BlockRows& blocks, int64_t first, int64_t last, int64_t from, int64_t none) {
  int64_t key = none;
  for (int64_t r = first / blocks.size; r <= last / blocks.size; r++) {
    const int32_t at = find_block(blocks, r, from / blocks.size);
    if (at < blocks.offsets[r + 1]) key = min_of(key, max_of(from, blocks.index[at] * blocks.size));
  }
  return key;
}
// one past the last such key below `to`; `from` where there is none past it
ATTN_NOINLINE int64_t block_keys_end(const BlockRows& blocks, int64_t first, int64_t last, int64_t from, int64_t to) {
  int64_t end = from;
  for (int64_t r = first / blocks.size; r <= last / blocks.size; r++) {
    const int32_t at = find_block(blocks, r, (to + blocks.size - 1) / blocks.size) - 1;
    if (at >= blocks.offsets[r]) end = max_of(end, min_of(to, (blocks.index[at] + int64_t{1}) * blocks.size));
  }
  return end;
}
// whether the block of `row` and `key`, which is there, has elements
ATTN_INLINE bool is_partial(const BlockRows& blocks, int64_t row, int64_t key) {
  return blocks.partial[find_block(blocks, row / blocks.size, key / blocks.size)] >= 0;
}

// Calls f(lanes begin, end, keys begin, end, elements or null, seen) for every block of rows [first, first + rows) and
// keys [k0, k0 + n); begin and end relative to first and k0. elements: of the first row and key, a row of `size` each.
template <class F>
ATTN_INLINE void each_block(const BlockRows& blocks, int64_t first, int64_t rows, int64_t k0, int64_t n, const F& f) {
  for (int64_t r = 0; r < rows;) {
    const int64_t row = first + r, row_block = row / blocks.size,
                  r_end = min_of(rows, (row_block + 1) * blocks.size - first);
    int32_t at = find_block(blocks, row_block, k0 / blocks.size);
    for (int64_t k = 0; k < n;) {
      const int64_t key = k0 + k, key_block = key / blocks.size, k_end = min_of(n, (key_block + 1) * blocks.size - k0);
      const bool seen = at < blocks.offsets[row_block + 1] && blocks.index[at] == key_block;
      const int32_t partial = seen ? blocks.partial[at] : -1;
      const uint8_t* elements = nullptr;
      if (partial >= 0)
        elements = blocks.elements + (partial * blocks.size + row % blocks.size) * blocks.size + key % blocks.size;
      f(r, r_end, k, k_end, elements, seen);
      at += seen;
      k = k_end;
    }
    r = r_end;
  }
}

}  // namespace
}  // namespace attnjourney
