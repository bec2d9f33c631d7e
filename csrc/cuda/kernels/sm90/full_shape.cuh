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

// Mask: fp32 or same, of a floating one; none: it is boolean, of blocks, or there is none. A bias takes the room of a
// second stage of Q, and of 128 keys at 192 columns, where three stages of 64 fit.
template <class T, int Dqk, int Dv, MaskElement Mask, bool Bias = Mask != MaskElement::none>
using Sm90FullBase = Sm90ForwardShape<T, Dqk, Dv, 2, Dqk == 256 || (Dqk == 192 && Bias) ? 64 : 128,
                                      Dqk == 64            ? 4
                                      : Dqk == 192 && Bias ? 3
                                                           : 2,
                                      Dqk == 64 || (Dqk == 128 && !Bias) ? 2 : 1, true, false, 0, false>;

template <class T, int Dqk, int Dv, MaskElement Mask>
struct Sm90FullShape : Sm90FullBase<T, Dqk, Dv, Mask> {
  using Base = Sm90FullBase<T, Dqk, Dv, Mask>;
  static constexpr bool kOptions = true, kScouts = false;
  static constexpr bool kBias = Mask != MaskElement::none, kWideBias = Mask == MaskElement::fp32;
  // P V of a tile under the scores of the next one; a bias in float32 takes the registers that this needs
  static constexpr bool kOverlap = !kWideBias;
  // A ring of two parts of the mask: a tile in 16 bits, or half of the keys of one in float32. In panels of kRows rows
  // of 128 bytes, swizzled.
  static constexpr int kMaskStages = 2, kMaskParts = kWideBias ? 2 : 1;
  static constexpr int kMaskPanels = Base::kKeys / 64, kMaskPanel = Base::kRows * 128;
  static constexpr int kMaskBytes = kMaskPanels * kMaskPanel;
  static constexpr int kMaskAt = kBias ? (Base::kSmemBytes + 1023) / 1024 * 1024 : Base::kSmemBytes;
  static constexpr int kMaskBarriersAt = kMaskAt + (kBias ? kMaskStages * kMaskBytes : 0);
  static constexpr int kSlotsAt = kMaskBarriersAt + (kBias ? 16 * kMaskStages : 0);
  static constexpr int kTilesAt = kSlotsAt + 8 * sizeof(Sm90FullSlot);
  static constexpr int kSmemBytes = kTilesAt + Base::kStages * sizeof(Sm90FullTile);
  static_assert(kSlotsAt % alignof(Sm90FullSlot) == 0 && kSmemBytes <= 227 * 1024);
};

// The mask's part n of all: where it lies, and its barriers.
template <class Shape>
struct Sm90FullMaskPart {
  uint32_t at, full, empty;
  int parity;
  __device__ __forceinline__ Sm90FullMaskPart(uint32_t smem, int n) {
    const int stage = n % Shape::kMaskStages;
    at = smem + Shape::kMaskAt + stage * Shape::kMaskBytes;
    full = smem + Shape::kMaskBarriersAt + 8 * stage, empty = full + 8 * Shape::kMaskStages;
    parity = n / Shape::kMaskStages & 1;
  }
  static __device__ __forceinline__ void init(uint32_t smem) {
    for (int n = 0; n < Shape::kMaskStages; n++) {
      const Sm90FullMaskPart part(smem, n);
      ptx::mbarrier_init(part.full, 1);
      ptx::mbarrier_init(part.empty, 4 * Shape::kGroups);
    }
  }
};

// mask: a floating one where mask_tiles, else consumers copy the rows they read. In 16-bit numbers, a float32 as two;
// sizes (columns, heads, rows, batch) of its own, boxes of 64 x kRows, or x 1 where all rows are the same.
struct Sm90FullForwardMaps : Sm90ForwardMaps {
  ptx::TensorMap mask;
  bool mask_tiles, mask_batched;
};

}  // namespace attnjourney
