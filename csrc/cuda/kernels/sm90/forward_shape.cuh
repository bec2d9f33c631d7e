// Tile sizes and shared memory of the Hopper forward, and what its parts share.
#pragma once
#include "cuda/kernels/common/forward_task.cuh"
#include "cuda/ptx/sm90.cuh"
#include "tma_rows.cuh"

namespace attnjourney {

// Groups: consumer warpgroups of 64 query rows; Stages: of K and of V; QueryStages: of each warpgroup's Q; PingPong:
// the warpgroups issue their products in turns; Early: groups of 8 keys whose exponentials are computed before the
// maximum is known; Store: the output leaves by TMA through shared memory of its own.
template <class T_, int Dqk_, int Dv_, int Groups_, int Keys_, int Stages_, int QueryStages_, bool Ranged_,
          bool PingPong_, int Early_, bool Store_>
struct Sm90ForwardShape {
  using T = T_;
  static constexpr int kDqk = Dqk_, kDv = Dv_, kGroups = Groups_, kKeys = Keys_, kStages = Stages_;
  static constexpr int kQueryStages = QueryStages_, kEarly = Early_;
  static constexpr bool kRanged = Ranged_, kPingPong = PingPong_, kStore = Store_, kOptions = false;
  // warps that look at values: forward_scouts.cuh; beside three warpgroups, and at 192 columns of float16, there are no
  // registers for it
  static constexpr bool kScouts = Ranged_ && Groups_ == 2 && !(Dqk_ == 192 && std::is_same_v<T_, Half>);
  static constexpr int kCluster = 1;  // see Sm90ClusterShape
  static constexpr int kRows = 64 * kGroups, kThreads = 128 * (kGroups + 1);
  // bytes of a warpgroup's Q, of a stage of K, of V
  static constexpr int kQueryBytes = 64 * kDqk * 2, kKeyBytes = kKeys * kDqk * 2, kValueBytes = kKeys * kDv * 2;
  static constexpr int kQueries = kGroups * kQueryStages;
  static constexpr bool kTight = Groups_ == 3 && Ranged_;  // few registers: what can be had again is not held
  // offsets in shared memory
  static constexpr int kKeyAt = kQueries * kQueryBytes, kValueAt = kKeyAt + kStages * kKeyBytes;
  static constexpr int kOutAt = kValueAt + kStages * kValueBytes;
  static constexpr int kBarriersAt = kOutAt + (kStore ? kGroups * 64 * kDv * 2 : 0);
  static constexpr int kSlotsAt = kBarriersAt + 16 * kQueries + (kScouts ? 48 : 32) * kStages;  // four a warpgroup
  static constexpr int kFlagsAt = kSlotsAt + 256 * kGroups;  // of finite values: see forward_scouts.cuh, or finite.cuh
  static constexpr int kScoutBytes = kScouts ? 16 * kStages + 32 : 0;
  static constexpr int kSmemBytes = kFlagsAt + (!Ranged_ ? 0 : kScoutBytes > 32 * kGroups ? kScoutBytes : 32 * kGroups);
  static constexpr int kProducerRegisters = kGroups == 2 ? 40 : 32, kConsumerRegisters = kGroups == 2 ? 232 : 160;
  static_assert(kDqk % 64 == 0 && kDv % 64 == 0 && kKeys % 16 == 0 && kSmemBytes <= 227 * 1024);
  static_assert(kGroups == 2 || kGroups == 3);
  static_assert(kSlotsAt % 16 == 0);
};

// Two blocks of a cluster work on neighbouring tiles of rows of one key head, on the same keys at the same time: each
// brings half of the rows of a tile of K and V, to both. The second-level cache is read half as often. Of tiles that
// see all keys, an even number a key head, tile i, i + grid, ..., in a grid of an even number of blocks (sizes.h:
// blocks_in_pairs).
template <class Base>
struct Sm90ClusterShape : Base {
  static constexpr int kCluster = 2;
  static_assert(!Base::kRanged && Base::kKeys % 16 == 0);  // half of a tile: whole patterns of 8 rows
};

// A tile as one warpgroup sees it, key tiles by number. The producer decodes it: divisions in the consumers made them
// spill.
struct __align__(16) Sm90ForwardSlot {
  // 1 + the number of key tiles that only other warpgroups see before this one's first; 0: no row sees a key; -1: there
  // are no more tiles
  int start;
  int first, row, head;             // first: the last key tile that this warpgroup sees, which works downwards
  struct __align__(16) TileRange {  // see KeyTiles; read in one load
    int begin, prefix, whole_begin, whole_end;
  } tiles;
  int batch, q_len, key_length, offset;  // of the sequence
  int key_end, last;                     // the end of the keys that the block sees, its last tile
  int rows, q_begin;                     // with options: see Sequence
  __device__ __forceinline__ Sequence sequence(const ForwardTask& task) const {
    Sequence s{q_len, task.keys};
    s.keys.set_length(key_length);
    s.keys.offset = offset;
    return s;
  }
};

constexpr int kScoutWarps = 3;  // warps, those of the producer's warpgroup but its own

// Addresses of the mbarriers. Q is a ring of kQueryStages for each warpgroup: index group * kQueryStages + stage.
template <class Shape>
struct Sm90ForwardBarriers {
  uint32_t q_full, q_empty, k_full, k_empty, v_full, v_empty, v_seen;  // v_seen: where there are scouts
  explicit __device__ __forceinline__ Sm90ForwardBarriers(uint32_t base)
      : q_full(base),
        q_empty(base + 8 * Shape::kQueries),
        k_full(base + 16 * Shape::kQueries),
        k_empty(k_full + 8 * Shape::kStages),
        v_full(k_full + 16 * Shape::kStages),
        v_empty(k_full + 24 * Shape::kStages),
        v_seen(k_full + 32 * Shape::kStages) {}
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < Shape::kQueries; i++) {
      ptx::mbarrier_init(q_full + 8 * i, 1);
      ptx::mbarrier_init(q_empty + 8 * i, 4);
    }
    for (int i = 0; i < Shape::kStages; i++) {
      ptx::mbarrier_init(k_full + 8 * i, 1);
      ptx::mbarrier_init(k_empty + 8 * i, 4 * Shape::kGroups * Shape::kCluster);
      ptx::mbarrier_init(v_full + 8 * i, 1);
      ptx::mbarrier_init(v_empty + 8 * i, 4 * Shape::kGroups * Shape::kCluster + (Shape::kScouts ? kScoutWarps : 0));
      if (Shape::kScouts) ptx::mbarrier_init(v_seen + 8 * i, kScoutWarps);
    }
    ptx::fence_mbarrier_init();
  }
};

// What the threads of a block do: one feeds the tiles, the other warps of its warpgroup may look at them, the consumer
// warpgroups work on them.
template <class Shape, class Produce, class Consume, class... Scout>
__device__ __forceinline__ void sm90_forward_roles(Produce&& produce, Consume&& consume, Scout&&... scout) {
  unsigned char* base = ptx::dynamic_smem();
  const uint32_t smem = ptx::smem_addr(base);
  const Sm90ForwardBarriers<Shape> barriers(smem + Shape::kBarriersAt);
  if (threadIdx.x == 0) barriers.init();
  if constexpr (Shape::kCluster > 1)
    ptx::cluster_sync();  // @cluster_met
  else
    __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) produce(smem, base, barriers);
    if (threadIdx.x >= 32) (scout(base, barriers), ...);
  } else {
    ptx::setmaxnreg_inc<Shape::kConsumerRegisters>();
    consume(smem, base, barriers);
  }
}

// Boxes: query 64 columns x 64 rows, key and value 64 x kKeys / kCluster, out 64 x 16; sizes (dim, heads, length,
// batch).
struct Sm90ForwardMaps {
  ptx::TensorMap query, key, value, out;
  ptx::TensorMap value8, value1;  // boxes of 8 rows and of one
};

}  // namespace attnjourney
