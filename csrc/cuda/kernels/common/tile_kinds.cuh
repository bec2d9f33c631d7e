// What a boolean mask or one of blocks does to tiles of rows and keys, found out once before a kernel walks them: most
// masks are the same for many heads. Two bits for each tile: is some pair seen, are all of them?
#pragma once
#include "scores.cuh"

namespace attnjourney {

// The bits of 32 tiles of keys lie together. Rows and keys past the tensors' ends do not count, nor do ranges of keys.
struct TileKinds {
  uint2* bits;               // [entries, row_tiles, words]: some, all; null: no such mask
  int rows;                  // of a tile
  int row_tiles, words;      // row_tiles is 1 where the mask is uniform over rows
  int heads, entries;        // heads: 1 where it is uniform over them; entries: heads and batch items that differ
  int64_t batch[kMaskDims];  // entries from one index of the batch to the next, divided by heads; 0: uniform

  size_t count() const { return static_cast<size_t>(entries) * row_tiles * words; }
  // of a tile of rows; tiles past the last one count as that
  template <class Real>
  __device__ __forceinline__ const uint2* of(const ScoresOf<Real>& s, int item, int head, int row_tile) const {
    const int64_t entry = batch_offset(s, batch, item) * heads + (heads > 1 ? head : 0);
    return bits + (entry * row_tiles + min(row_tile, row_tiles - 1)) * words;
  }
  // of key tile n, `tiles` as of() gives them
  static __device__ __forceinline__ TileKind kind(const uint2* tiles, int n) {
    const uint2 word = tiles[n / 32];
    return !(word.x >> n % 32 & 1) ? TileKind::hidden : word.y >> n % 32 & 1 ? TileKind::whole : TileKind::partial;
  }
};

// keys: of a tile. `bits` is left to the caller, room for count() of them.
template <class Real>
inline TileKinds plan_tile_kinds(const SequenceTaskOf<Real>& p, int q_heads, int rows, int keys) {
  const ScoresOf<Real>& s = p.scores;
  TileKinds k{};
  if (s.mask_kind != MaskElement::boolean && s.mask_kind != MaskElement::blocks) return k;
  const bool uniform = s.mask_kind == MaskElement::boolean && s.mask_row == 0;
  k.rows = rows, k.row_tiles = uniform ? 1 : (p.q_len + rows - 1) / rows;
  k.words = ((p.kv_len + keys - 1) / keys + 31) / 32;
  k.heads = s.mask_head ? q_heads : 1;
  int items = 1;
  for (int d = s.mask_dims - 1; d >= 0; d--)
    if (s.mask_batch[d] && s.mask_size[d] > 1) {
      k.batch[d] = items;
      items *= s.mask_size[d];
    }
  k.entries = items * k.heads;
  return k;
}

constexpr int kKindsThreads = 1024, kKindsBytes = 256;

// zero in the bytes that are zero, 0x80 in the others
__device__ __forceinline__ uint32_t not_zero_bytes(uint32_t x) {
  return (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u;
}

// One of the warp's lanes' part of a tile of a boolean mask, in chunks of four keys: is some pair seen, are all?
template <int Keys, class Real>
__device__ __forceinline__ uint2 kind_of_tile(const ScoresOf<Real>& s, const unsigned char* mask, int rows, int keys,
                                              int lane) {
  constexpr int kChunks = Keys / 4;
  const bool dense = s.mask_col == 1 && s.mask_row % 4 == 0 && reinterpret_cast<uintptr_t>(mask) % 4 == 0;
  uint2 seen{0, 0x80808080u};
#pragma unroll 8
  for (int i = lane; i < rows * kChunks; i += 32) {
    const int row = i / kChunks, key = i % kChunks * 4;
    if (key >= keys) continue;
    uint32_t x = 0;
    const unsigned char* at = mask + row * s.mask_row + key * s.mask_col;
    if (dense && key + 4 <= keys) {
      x = *reinterpret_cast<const uint32_t*>(at);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++)  // keys that there are not: as the first of the chunk
        x |= uint32_t(at[key + e < keys ? e * s.mask_col : 0]) << 8 * e;
    }
    x = not_zero_bytes(x);
    seen.x |= x, seen.y &= x;
  }
  return seen;
}

// Tiles of Keys keys. grid: entries * row_tiles * words; a warp for each of the 32 tiles of a word, or, with blocks,
// one warp for all of them.
template <int Keys>
__global__ void __launch_bounds__(kKindsThreads) tile_kinds(const SequenceTask p, const TileKinds k) {
  const Scores& s = p.scores;
  const int word = blockIdx.x % k.words, row_tile = blockIdx.x / k.words % k.row_tiles;
  const int entry = blockIdx.x / k.words / k.row_tiles, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t at = entry % k.heads * s.mask_head;
  int item = entry / k.heads;
  for (int d = s.mask_dims - 1; d >= 0; d--)
    if (k.batch[d]) {
      at += item % s.mask_size[d] * s.mask_batch[d];
      item /= s.mask_size[d];
    }
  const unsigned char* mask = static_cast<const unsigned char*>(s.mask) + at * s.mask_bytes;
  const int row = row_tile * k.rows, rows = k.row_tiles == 1 && s.mask_row == 0 ? 1 : min(k.rows, p.q_len - row);
  const auto keys_of = [&](int tile) { return min(Keys, p.kv_len - tile * Keys); };
  if (s.mask_kind == MaskElement::blocks) {
    if (warp > 0) return;
    const int tile = word * 32 + lane;
    const HeadBlocks blocks{s.blocks, reinterpret_cast<const int*>(mask)};
    const TileKind kind =
        keys_of(tile) > 0 ? blocks.kind(row, min(k.rows, p.q_len - row), tile * Keys, keys_of(tile)) : TileKind::hidden;
    const uint32_t some = ptx::ballot(kind != TileKind::hidden), all = ptx::ballot(kind == TileKind::whole);
    if (lane == 0) k.bits[blockIdx.x] = uint2{some, all};
    return;
  }
  uint2* found = reinterpret_cast<uint2*>(ptx::dynamic_smem());
  const int tile = word * 32 + warp;
  uint2 seen{0, 0};
  if (keys_of(tile) > 0)
    seen =
        kind_of_tile<Keys>(s, mask + row * s.mask_row + int64_t(tile) * Keys * s.mask_col, rows, keys_of(tile), lane);
  const bool some = ptx::any(seen.x != 0), all = !ptx::any(seen.y != 0x80808080u);
  if (lane == 0) found[warp] = uint2{some, all};
  __syncthreads();
  if (warp > 0) return;
  const uint2 own = found[lane];
  const uint2 bits{ptx::ballot(own.x != 0), ptx::ballot(own.y != 0)};
  if (lane == 0) k.bits[blockIdx.x] = bits;
}

}  // namespace attnjourney
