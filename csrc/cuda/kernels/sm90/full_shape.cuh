// Shared memory of the Hopper forward with options, and what its producer passes to its consumers.
#pragma once
#include "cuda/kernels/common/tile_kinds.cuh"
#include "forward_shape.cuh"

namespace attnjourney {

// tiles and last are those of the warpgroup's own rows here, first is the block's last tile; block_begin and
// block_prefix are the block's, k_begin is the sequence's.
struct Sm90FullSlot : Sm90ForwardSlot {
  alignas(HeadScores) unsigned char scores_[sizeof(HeadScores)];
  const uint2* kinds;  // TileKinds of the warpgroup's rows, or null
  int block_begin, block_prefix, k_begin, unused;
  __device__ __forceinline__ const HeadScores& scores() const { return *reinterpret_cast<const HeadScores*>(scores_); }
  __device__ __forceinline__ TileKind kind(int key_tile) const {
    if (key_tile >= tiles.prefix && (key_tile < tiles.begin || key_tile > last)) return TileKind::hidden;
    const TileKind masked = kinds ? TileKinds::kind(kinds, key_tile) : TileKind::whole;
    return masked == TileKind::whole && (key_tile < tiles.whole_begin || key_tile >= tiles.whole_end)
               ? TileKind::partial
               : masked;
  }
};

// The key tile in a stage
struct Sm90FullTile {
  int number;
  int flags;  // the kind for each warpgroup, 2 bits, and whether it is the last one of these rows, from bit 4 on
  static __device__ __forceinline__ int pack(TileKind first, TileKind second, bool last) {
    return static_cast<int>(first) | static_cast<int>(second) << 2 | int(last) << 4;
  }
  __device__ __forceinline__ TileKind kind(int group) const { return static_cast<TileKind>(flags >> 2 * group & 3); }
  __device__ __forceinline__ bool last() const { return flags >> 4; }
};

template <class T, int Dqk, int Dv, int QueryStages>
using Sm90FullBase =
    Sm90ForwardShape<T, Dqk, Dv, 2, Dqk == 256 ? 64 : 128, Dqk == 64 ? 4 : 2, QueryStages, true, false, 0, false>;

// Bias: the mask is floating; else it is boolean, of blocks, or there is none.
template <class T, int Dqk, int Dv, int QueryStages, bool Bias>
struct Sm90FullShape : Sm90FullBase<T, Dqk, Dv, QueryStages> {
  using Base = Sm90FullBase<T, Dqk, Dv, QueryStages>;
  static constexpr bool kOptions = true, kScouts = false, kBias = Bias;
  // P V of a tile under the scores of the next one; a bias takes the registers that this needs
  static constexpr bool kOverlap = !Bias;
  static constexpr int kSlotsAt = Base::kSmemBytes, kTilesAt = kSlotsAt + 8 * sizeof(Sm90FullSlot);
  static constexpr int kSmemBytes = kTilesAt + Base::kStages * sizeof(Sm90FullTile);
  static_assert(kSlotsAt % alignof(Sm90FullSlot) == 0 && kSmemBytes <= 227 * 1024);
};

}  // namespace attnjourney
