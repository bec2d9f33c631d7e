// A mask of blocks next to tiles of rows and keys: which tiles hide everything, nothing or some pairs, and which pairs.
// The lists are taken as they come: nothing outside the tensors is read whatever they say, and numbers that lead
// nowhere hide: a check of them would wait for the device.
#pragma once
#include "cuda/ptx/sm80.cuh"
#include "sequence.cuh"

namespace attnjourney {

enum class TileKind : int { hidden, partial, whole };

// The lists of one head; its offsets are found as a mask is (HeadScores, scores.cuh).
struct HeadBlocks {
  static constexpr int kHidden = -2, kWhole = -1;
  const BlockLists& lists;
  const int* offsets;  // [row blocks + 1]

  // the places of a row's blocks
  __device__ __forceinline__ Range row(int r) const {
    const int end = max(0, min(offsets[r + 1], lists.count));
    return {max(0, min(offsets[r], end)), end};
  }
  // the first place whose key block is not before this one; or the end
  __device__ __forceinline__ int find(Range places, int key_block) const {
    while (places.begin < places.end) {
      const int middle = places.begin + (places.end - places.begin) / 2;
      if (lists.index[middle] < key_block)
        places.begin = middle + 1;
      else
        places.end = middle;
    }
    return places.begin;
  }

  // Rows [row, row + rows) against keys [key, key + keys); no more keys than the tensor has.
  __device__ __forceinline__ TileKind kind(int first_row, int rows, int key, int keys) const {
    const int first = key / lists.size, last = (key + keys - 1) / lists.size;
    bool some = false, all = true;
    for (int r = first_row / lists.size; r <= min((first_row + rows - 1) / lists.size, lists.rows - 1); r++) {
      const Range places = row(r);
      int expected = first;
      for (int at = find(places, first); at < places.end && lists.index[at] <= last; at++) {
        some = true;
        all = all && lists.index[at] == expected++ && lists.partial[at] == kWhole;
      }
      all = all && expected == last + 1;
    }
    return !some ? TileKind::hidden : all ? TileKind::whole : TileKind::partial;
  }

  // What there is to the block of a pair: kHidden, kWhole, or the number of its elements.
  __device__ __forceinline__ int block_of(int row_, int key) const {
    const int r = row_ / lists.size, k = key / lists.size;
    if (r >= lists.rows) return kHidden;
    const Range places = row(r);
    const int at = find(places, k);
    if (at == places.end || lists.index[at] != k) return kHidden;
    const int number = lists.partial[at];
    return number >= kWhole && number < lists.partial_blocks ? number : kHidden;
  }
};

// `seen` without what the blocks hide; row, key: of the thread's element 0. A fragment is made of 16 x 16 pairs, eight
// a thread, or of half as many, which lie in one block each; each of the first lanes looks one up. All lanes of the
// warp.
template <class F>
__device__ __forceinline__ uint32_t seen_in_blocks(const HeadBlocks& b, int row, int key, int lane, uint32_t seen,
                                                   F f = {}) {
  constexpr int kGroup = F::kCount < 8 ? F::kCount : 8, kGroups = F::kCount / kGroup;
  const int row0 = row & ~15, key0 = key & ~15, size = b.lists.size;
  int mine = HeadBlocks::kHidden;
  if (lane < kGroups) mine = b.block_of(row0 + f.row(kGroup * lane), key0 + f.key(kGroup * lane));
#pragma unroll
  for (int m = 0; m < kGroups; m++) {
    const int number = static_cast<int>(ptx::shfl(static_cast<uint32_t>(mine), m));
    if (number == HeadBlocks::kHidden) seen &= ~(0xffu << kGroup * m);
    if (number < 0) continue;
    const int r = (row0 + f.row(kGroup * m)) % size + row - row0, k = (key0 + f.key(kGroup * m)) % size + key - key0;
    const unsigned char* elements = b.lists.elements + (int64_t(number) * size + r) * size + k;
#pragma unroll
    for (int i = kGroup * m; i < kGroup * (m + 1); i++)
      if (!elements[(f.row(i) - f.row(kGroup * m)) * size + f.key(i) - f.key(kGroup * m)]) seen &= ~(1u << i);
  }
  return seen;
}

// Which tiles come next: every thread of the block looks at one of the next Threads tiles, and what they found lies in
// shared memory.
template <int Threads>
struct TileWindow {
  static constexpr int kBytes = 2 * Threads / 32 * 4;
  uint32_t* found;  // [some pair is seen, all are][Threads / 32]
  int base = -Threads;

  // The first tile from n on that is not hidden, or end. kind(tile) -> TileKind. All threads of the block.
  template <class Kind>
  __device__ __forceinline__ int next(int n, int end, Kind&& kind) {
    while (n < end) {
      if (n - base >= Threads) {
        base = n;
        const int mine = n + static_cast<int>(threadIdx.x);
        const TileKind own = mine < end ? kind(mine) : TileKind::hidden;
        const uint32_t some = ptx::ballot(own != TileKind::hidden), all = ptx::ballot(own == TileKind::whole);
        __syncthreads();  // @found_read: what was found before has been read
        if (threadIdx.x % 32 == 0) {
          found[threadIdx.x / 32] = some;
          found[Threads / 32 + threadIdx.x / 32] = all;
        }
        __syncthreads();
      }
      const int at = n - base;
      const uint32_t left = found[at / 32] >> at % 32;
      if (left) return n + ptx::first_bit(left);
      n += 32 - at % 32;
    }
    return end;
  }
  // does tile n, which next() gave, hide nothing?
  __device__ __forceinline__ bool whole(int n) const {
    const int at = n - base;
    return found[Threads / 32 + at / 32] >> at % 32 & 1;
  }
};

}  // namespace attnjourney
