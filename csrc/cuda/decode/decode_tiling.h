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
  bool joins = false;         // can its last block join the parts of a unit?
  bool shares_all = false;    // do blocks share the keys of all sequences (kernels/decode/ragged_shares.cuh)?
};

constexpr int kMostGroups = 384;  // see decode_groups

// Does it, in place of a kernel that is launched for it? 128 KB of parts are read by one block in the time of a launch.
inline bool last_blocks_join(int64_t units, int64_t rows, int splits, int64_t v_head_dim, const DecodeTiling& tiling) {
  const int64_t bytes = std::min<int64_t>(rows, tiling.rows) * splits * v_head_dim * 4;
  return tiling.joins && splits > 1 && units <= kMostArrivals && bytes <= (128 << 10);
}

// Rows of one key head from which attention's kernels, which read keys once for 64 rows of a head or more, are the
// better ones: until then, keys are split.
constexpr int64_t kFewRows = 128;

// Are 16-bit numbers split, too, though rows are many? A block of attention's kernels goes through all keys with 128
// rows of a head (64 but on Hopper), some 20 clocks a key; decoding's multiprocessors share keys out and take some 38
// for 64 rows, of all heads of a group. So it is where blocks are few, or where a head's rows fill little of them.
inline bool many_rows_are_split(int64_t pairs, int64_t group, int64_t q_len, int64_t keys, const Device& device) {
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t blocks = pairs * group * up(q_len, device.capability == 90 ? 128 : 64);
  const int64_t units = pairs * up(group * q_len, 64), multiprocessors = device.multiprocessors;
  return keys >= 1024 && 2 * units < multiprocessors * up(blocks, multiprocessors);
}

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

// Groups of blocks that share the keys of all sequences, at most `keys` of each: blocks take equally long, so what
// counts is how well they fill rounds of multiprocessors, at most four, for the parts' sake (263 KB a block).
// row_tiles: blocks of a group.
inline int decode_groups(int64_t batch, int64_t row_tiles, int64_t keys, const DecodeTiling& tiling,
                         const Device& device) {
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t all = batch * (up(keys, tiling.keys) + 1);
  const int64_t most = std::clamp<int64_t>(std::min(4 * device.multiprocessors / row_tiles, all / 2), 1, kMostGroups);
  int best = 1;
  double least = 0;
  for (int groups = 1; groups <= most; groups++) {
    const int64_t rounds = up(groups * row_tiles, device.multiprocessors);
    const double time = static_cast<double>(rounds) * (static_cast<double>(all) / groups + 4);  // 4 tiles' beside keys
    if (groups == 1 || time < least) best = groups, least = time;
  }
  return best;
}

}  // namespace attnjourney
