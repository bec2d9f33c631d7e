// How the key blocks of one key/value head are dealt to the parts that threads take of it.
#pragma once
#include "attention/params.h"
#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

// The share of key blocks `part` of `parts` of one key/value head: dealt in a snake, so that causal shares are even.
ATTN_INLINE bool owns(int64_t block, int64_t part, int64_t parts) {
  const int64_t round = block / parts, seat = block % parts;
  return part == (round & 1 ? parts - 1 - seat : seat);
}

// Keys at a time: all parts of a head get as many blocks, of a size, or nearly so: of sizes down to half of the largest
// that with which the largest part is smallest. Under a causal mask or a window at least two of them, since one alone
// may be seen by all rows or by a few.
ATTN_INLINE int64_t even_step(const AttentionParams& params, int64_t step, int64_t parts) {
  if (parts == 1 || params.block_size || params.kv_len == 0) return step;
  const int64_t least = params.keys.bounded() ? 2 : 1;
  const int64_t blocks = parts * max_of(least, (params.kv_len + parts * step - 1) / (parts * step));
  const int64_t largest = min_of(step, round_up((params.kv_len + blocks - 1) / blocks, 16));
  int64_t best = largest, keys = INT64_MAX;
  for (int64_t size = largest; size >= max_of(16, largest / 2); size -= 16) {
    const int64_t count = (params.kv_len + size - 1) / size, of_part = (count + parts - 1) / parts * size;
    if (of_part < keys) best = size, keys = of_part;
  }
  return best;
}

// The keys of the largest part
ATTN_INLINE int64_t keys_of_part(const AttentionParams& params, int64_t step, int64_t parts) {
  const int64_t even = even_step(params, step, parts), blocks = (params.kv_len + even - 1) / even;
  return min_of(params.kv_len, (blocks + parts - 1) / parts * even);
}

}  // namespace
}  // namespace attnjourney
