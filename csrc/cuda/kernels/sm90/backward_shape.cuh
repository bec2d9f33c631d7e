// Tile sizes, shared memory and operand layouts of the Hopper backward.
#pragma once
#include "cuda/kernels/common/backward_task.cuh"
#include "cuda/ptx/sm90.cuh"
#include "tma_rows.cuh"

namespace attnjourney {

// D: columns of Q and K, and of V and dO, which of 192 have 128. Up to 192 a warpgroup has half of a block's keys, at
// 256 half of the columns of dK, dV and dQ (kByColumns).
template <class T_, int D, int Rows, bool Deterministic>
struct Sm90BackwardShape {
  using T = T_;
  static constexpr int kD = D, kDv = D == 192 ? 128 : D, kRows = Rows, kKeys = D == 256 ? 64 : 128;
  static constexpr int kThreads = 384;
  static constexpr int kScoreRows = D > 128 ? 32 : Rows;  // rows whose scores a warpgroup holds at a time
  static constexpr bool kByColumns = D == 256;
  static constexpr int kHeld = kByColumns ? D / 2 : D, kHeldDv = kByColumns ? kDv / 2 : kDv;  // columns of a warpgroup
  static constexpr bool kDeterministic = Deterministic;
  // 64 columns a panel: of Q and K, of V and dO
  static constexpr int kQueryStages = D > 128 ? 2 : 3, kOutStages = D == 256 && Deterministic ? 1 : 2;
  static constexpr int kPanels = D / 64, kOutPanels = kDv / 64;
  static constexpr int kKeyPanel = kKeys * 128, kQueryPanel = Rows * 128, kScorePanel = kKeys * 128;  // bytes
  static constexpr int kKeyBytes = kPanels * kKeyPanel, kQueryBytes = kPanels * kQueryPanel;
  static constexpr int kValueBytes = kOutPanels * kKeyPanel, kOutBytes = kOutPanels * kQueryPanel;
  static constexpr int kPieces = Rows * D / 4096;  // of dQ: 64 x 64, one or two a warpgroup
  static constexpr int kScoreBytes = Rows / 64 * kScorePanel, kSumBytes = Deterministic ? 2 * 16384 : 0;
  static constexpr int kStages = kQueryStages + kOutStages, kInverseBytes = 0;
  static constexpr int kVoteBytes = 32 + 32 * (Rows / kScoreRows);
  static constexpr int kSmemBytes = kKeyBytes + kValueBytes + kQueryStages * kQueryBytes + kOutStages * kOutBytes +
                                    2 * kScoreBytes + kSumBytes + kStages * Rows * 4 + 8 * (1 + 2 * kStages) +
                                    kVoteBytes + 2 * 512;
  static constexpr int kProducerRegisters = kByColumns ? 40 : 24, kConsumerRegisters = kByColumns ? 232 : 240;
  static_assert(kPieces >= 2 && kPieces <= 4);
  static_assert(kSmemBytes <= 227 * 1024);

  // Does the warpgroup add this piece of dQ of a query tile? The last of three is added in turns.
  static __device__ __forceinline__ bool adds(int piece, int group, int tile) {
    return kPieces == 4 ? piece / 2 == group : piece < 2 ? piece == group : tile % 2 == group;
  }

  // Operands in 128-byte-swizzled panels 64 elements wide, groups of 8 rows 1024 bytes apart; MN-major ones with panels
  // `lead` bytes apart. code() is the part that depends on the address, once a tile.
  static __device__ __forceinline__ uint32_t code(uint32_t addr, uint32_t lead = 16) {
    return addr >> 4 | lead >> 4 << 16;
  }
  static __device__ __forceinline__ uint64_t desc(uint32_t code, uint32_t offset) {
    return uint64_t(code + offset / 16) | uint64_t(64 | 1u << 30) << 32;
  }
  // a 16-byte chunk of a row in such panels
  static __device__ __forceinline__ uint32_t chunk_at(uint32_t tile, int panel, int row, int chunk) {
    return tile + chunk / 8 * panel + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
  }

  // Position of an element in a tile of key_value_sum, of query_sum.
  static __device__ __forceinline__ void load_key(float (&x)[8], const float* tile, int row, int c) {
    load_fragment(x, tile, (row / 64 * (D / 8) + c) * 128, row % 64);
  }
  static __device__ __forceinline__ void load_query(float (&x)[8], const float* tile, int row, int c) {
    load_fragment(x, tile, ((Rows == 64 ? c / 8 : row / 64) * 8 + c % 8) * 128, row % 64);
  }
  static __device__ __forceinline__ void load_fragment(float (&x)[8], const float* tile, int first, int row) {
    const int at = first + row / 16 * 32 + row % 8 * 4;
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const float4 f = reinterpret_cast<const float4*>(tile)[at + t];
      x[2 * t] = row & 8 ? f.z : f.x;
      x[2 * t + 1] = row & 8 ? f.w : f.y;
    }
  }
};

// Addresses in shared memory; k is its start.
template <class Shape>
struct Sm90BackwardMemory {
  uint32_t k, v, q, d_out, ds, dq, lse, delta;           // lse: lse2, with options the reference
  uint32_t kv_full, q_full, q_empty, do_full, do_empty;  // mbarriers
  // of numbers that are not finite: votes of the eight warps, for keys and for rows; NaN or 0 for each key, for each
  // row of dO
  uint32_t votes, keys, rows;
  // score_tiles: of dS; more: bytes after them for others
  explicit __device__ __forceinline__ Sm90BackwardMemory(uint32_t base, int score_tiles = 2, int more = 0)
      : k(base),
        v(k + Shape::kKeyBytes),
        q(v + Shape::kValueBytes),
        d_out(q + Shape::kQueryStages * Shape::kQueryBytes),
        ds(d_out + Shape::kOutStages * Shape::kOutBytes),
        dq(ds + score_tiles * Shape::kScoreBytes + more),
        lse(dq + Shape::kSumBytes),
        delta(lse + Shape::kQueryStages * Shape::kRows * 4),
        kv_full(delta + Shape::kOutStages * Shape::kRows * 4 + Shape::kInverseBytes),
        q_full(kv_full + 8),
        q_empty(q_full + 8 * Shape::kQueryStages),
        do_full(q_empty + 8 * Shape::kQueryStages),
        do_empty(do_full + 8 * Shape::kOutStages),
        votes(do_empty + 8 * Shape::kOutStages),
        keys(votes + Shape::kVoteBytes),
        rows(keys + 512) {}
  __device__ __forceinline__ void init() const {
    ptx::mbarrier_init(kv_full, 1);
    for (int i = 0; i < Shape::kQueryStages; i++) {
      ptx::mbarrier_init(q_full + 8 * i, 1);
      ptx::mbarrier_init(q_empty + 8 * i, 8);
    }
    for (int i = 0; i < Shape::kOutStages; i++) {
      ptx::mbarrier_init(do_full + 8 * i, 1);
      ptx::mbarrier_init(do_empty + 8 * i, 8);
    }
    ptx::fence_mbarrier_init();
  }
};

// Boxes: query, grad_out 64 columns x kRows rows, key, value 64 x 128; sizes (dim, heads, length, batch).
struct Sm90BackwardMaps {
  ptx::TensorMap query, key, value, grad_out;
  ptx::TensorMap query8, key8, value8, grad_out8, query1, key1, value1, grad_out1;  // boxes of 8 rows and of one
};

}  // namespace attnjourney
