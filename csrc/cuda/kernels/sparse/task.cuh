// The parameters of the kernels of token-sparse attention. A unit is a row of indices with one key head: its items are
// the rows of query of that head's group that read these indices, and they are the rows of the products' tiles.
#pragma once
#include "cuda/kernels/common/forward_task.cuh"
#include "cuda/kernels/common/numbers.cuh"
#include "sparse/params.h"

namespace attnjourney {

struct SparseTask {
  SparseParams params;
  const void *query, *key, *value;  // [batch, heads, length, head_dim or v_head_dim], the last dimension dense
  Strides q, k, v;
  const void* indices;     // int32, or int64 where `wide`: [batch, heads, blocks, index_count], the last one dense
  Strides names;           // of indices; head 0: one row for all heads
  const int* key_lengths;  // [batch] or null
  int batch, kv_heads, group, blocks;
  bool wide;
  double score_scale, cap, cap_factor;  // scale * log2(e); softcap * log2(e), 0: none; scale / softcap
  const void* sinks;                    // [batch, q_heads] in the type of the arithmetic, or null
  void *out, *lse, *stats;              // dense: [batch, q_heads, q_len, v_head_dim], [batch, q_heads, q_len], RowStats
  // of the backward; delta, like lse: sum(out * grad_out) - grad_lse
  const void *grad_out, *grad_lse;
  Strides g;
  void* delta;
  void* grad_query;  // dense
  void* grad_sinks;  // [batch, q_heads], or [q_heads] where `shared_sinks`
  bool shared_sinks;
};

// What a unit is, and where its tensors begin.
struct SparseUnit {
  int batch, head, block;
  int first_row, rows, items;  // of query; item i: head i / rows of the group, row i % rows
  int length, most;            // keys of the batch item; of those, as many as some row may see
  int64_t names;               // its first index
  __device__ __forceinline__ SparseUnit(const SparseTask& t, int batch_, int head_, int block_)
      : batch(batch_), head(head_), block(block_) {
    const SparseParams& p = t.params;
    const int64_t first = block * p.rows;
    first_row = static_cast<int>(first), rows = static_cast<int>(p.rows < p.q_len - first ? p.rows : p.q_len - first);
    items = t.group * rows;
    length = static_cast<int>(p.kv_len);
    if (t.key_lengths) length = max(0, min(length, t.key_lengths[batch]));
    most = static_cast<int>(p.limit(first_row + rows - 1, length));
    names = batch * t.names.batch + head * t.names.head + block * t.names.row;
  }
  // of [batch][kv_heads][blocks]
  __device__ __forceinline__ SparseUnit(const SparseTask& t, int number)
      : SparseUnit(t, number / t.blocks / t.kv_heads, number / t.blocks % t.kv_heads, number % t.blocks) {}
  // head and row of an item
  __device__ __forceinline__ int head_of(const SparseTask& t, int item) const { return head * t.group + item / rows; }
  __device__ __forceinline__ int row_of(int item) const { return first_row + item % rows; }
  // its place in lse
  __device__ __forceinline__ int64_t place(const SparseTask& t, int item) const {
    return (int64_t{batch} * t.kv_heads * t.group + head_of(t, item)) * t.params.q_len + row_of(item);
  }
  template <class T>
  __device__ __forceinline__ const T* row_in(const void* base, const Strides& s, const SparseTask& t, int item) const {
    return static_cast<const T*>(base) + batch * s.batch + head_of(t, item) * s.head + row_of(item) * s.row;
  }
  // How many keys, from the first one, an item may see; one that is not there: none.
  __device__ __forceinline__ int limit(const SparseTask& t, int item) const {
    return item < items ? static_cast<int>(t.params.limit(row_of(item), length)) : 0;
  }
  // Do items see different keys of those that are named?
  __device__ __forceinline__ bool hides(const SparseTask& t) const { return t.params.causal && rows > 1; }
  // The key that an index names, -1: none that a row of the unit sees.
  __device__ __forceinline__ int name(const SparseTask& t, int slot) const {
    if (slot >= t.params.index_count) return -1;
    const int64_t key = t.wide ? static_cast<const int64_t*>(t.indices)[names + slot]
                               : static_cast<const int*>(t.indices)[names + slot];
    return key >= 0 && key < most ? static_cast<int>(key) : -1;
  }
};

// The threads of a tile of Rows x Keys products: kPer, side by side, have a row, each kPairs pairs of its keys.
template <class Math, int Rows, int Keys>
struct SparseThreads {
  static constexpr int kPer = Math::kThreads / Rows < Keys / 2 ? Math::kThreads / Rows : Keys / 2;
  static constexpr int kPairs = Keys / 2 / kPer;
  static_assert(kPer * Rows <= Math::kThreads && Keys / 2 % kPer == 0);
};

// Items of a unit, from `first` on, into the Rows rows of a tile; zeros past the last one.
template <class Math, int Rows, class Tile>
__device__ __forceinline__ void load_items(const Tile& to, const SparseTask& t, const SparseUnit& unit,
                                           const void* base, const Strides& s, int first, int dim) {
  for (int r = threadIdx.x / 32; r < Rows; r += Math::kWarps) {
    const bool valid = first + r < unit.items;
    to.load(r, unit.row_in<typename Math::T>(base, s, t, valid ? first + r : first), valid, dim);
  }
}
// The row that a slot names into a tile's; -1: zeros.
template <class Tile, class T>
__device__ __forceinline__ void load_named(const Tile& to, int slot, const T* rows, int64_t row, int name, int dim) {
  const bool valid = name >= 0;
  to.load(slot, rows + (valid ? name * row : 0), valid, dim);
}

// The tiles of keys of a unit, each of Keys slots of its indices: what they name goes to shared memory by whole rows.
template <class Math, int Keys>
struct SparseGather {
  static constexpr int kPer = Keys / Math::kWarps;  // slots of a warp in a tile
  static_assert(Keys % Math::kWarps == 0 && kPer <= 32);
  // What lane i finds of slot warp + i * kWarps of a tile.
  static __device__ __forceinline__ int fetch(const SparseTask& t, const SparseUnit& unit, int tile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return lane < kPer ? unit.name(t, tile * Keys + warp + lane * Math::kWarps) : -1;
  }
  // Starts the copies of a tile whose names were fetched; f(slot, key): what one warp copies, key -1: zeros.
  template <class F>
  static __device__ __forceinline__ void start(int names, int* at, F&& f) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = 0; i < kPer; i++) {
      const int slot = warp + i * Math::kWarps, key = static_cast<int>(ptx::shfl(static_cast<uint32_t>(names), i));
      f(slot, key);
      if (lane == 0) at[slot] = key;
    }
  }
  // Does a tile name any key? All lanes of a warp.
  static __device__ __forceinline__ bool any(const int* at) {
    bool some = false;
#pragma unroll
    for (int i = 0; i < Keys; i += 32) {
      const int slot = i + threadIdx.x % 32;
      some = some || (slot < Keys && at[slot] >= 0);
    }
    return ptx::any(some);
  }
  // A unit's tiles one after another, stage by stage. start(names of the lanes, stage): begins the copies of one and
  // commits them; f(tile, stage, its names): once these and all before have landed. at: [stage][Keys].
  template <class Start, class F>
  static __device__ __forceinline__ void walk(const SparseTask& t, const SparseUnit& unit, const int* at, Start&& start,
                                              F&& f) {
    const int count = static_cast<int>((t.params.index_count + Keys - 1) / Keys);
    int fetched = count > 0 ? fetch(t, unit, 0) : -1;
    if (Math::kStages > 1 && count > 0) {
      start(fetched, 0);
      fetched = fetch(t, unit, 1);
    }
    for (int tile = 0; tile < count; tile++) {
      const int stage = Math::kStages > 1 ? tile & 1 : 0;
      if (Math::kStages == 1) {
        __syncthreads();  // @tile_read: every thread is past the tile before
        start(fetched, 0);
        fetched = fetch(t, unit, tile + 1);
      }
      Math::wait();
      __syncthreads();  // @tile_landed: every thread is past the tile before
      if (Math::kStages > 1 && tile + 1 < count) {
        start(fetched, stage ^ 1);
        fetched = fetch(t, unit, tile + 2);
      }
      const int* const named = at + stage * Keys;
      if (any(named)) f(tile, stage, named);
    }
    Math::wait();  // without any tile, what was copied before is still on its way
  }
  // The items of a unit, Rows at a time, against one tile, whose copies have begun; at: its names, of which there may
  // be none. start(first item, stage), f(first item, stage): as above.
  template <int Rows, class Start, class F>
  static __device__ __forceinline__ void walk_items(const SparseUnit& unit, const int* at, Start&& start, F&& f) {
    start(0, 0);
    for (int first = 0; first < unit.items; first += Rows) {
      const int stage = Math::kStages > 1 ? first / Rows & 1 : 0;
      if (Math::kStages == 1 && first > 0) {
        __syncthreads();  // @rows_read: every thread is past the rows before
        start(first, 0);
      }
      Math::wait();
      __syncthreads();  // @rows_landed: with the keys; every thread is past the rows before
      if (Math::kStages > 1 && first + Rows < unit.items) start(first + Rows, stage ^ 1);
      if (first == 0 && !any(at)) break;
      f(first, stage);
    }
    Math::wait();
  }
};

// A score from q . k, in log2 units; slope: its derivative by scale * q . k.
template <class Real>
__device__ __forceinline__ Real sparse_score(const SparseTask& t, Real product, Real* slope = nullptr) {
  if (!(t.cap > 0)) return ptx::rounded_product(product, static_cast<Real>(t.score_scale));
  const Real x = ptx::tanh(product * static_cast<Real>(t.cap_factor));
  if (slope) *slope = 1 - x * x;
  return static_cast<Real>(t.cap) * x;
}

// Ends a row: the factor of its output; lse and stats are written where `writes`. top: its reference, sum: of its
// weights against it, 0: it sees nothing.
template <class Real>
__device__ __forceinline__ Real end_sparse_row(const SparseTask& t, int64_t place, Real top, Real sum, bool writes) {
  Real inverse = sum == Real(0) ? Real(0) : Real(1) / sum;
  const double reference = double(top) * ln_2;
  Real lse = sum == Real(0) ? -Real(INFINITY) : Real(reference + ::log(double(sum)));
  if (t.sinks) {
    const double sink = static_cast<const Real*>(t.sinks)[place / t.params.q_len];
    const double above = sink * log2_e - double(top);
    if (sink == -double(INFINITY)) {
    } else if (sum == Real(0)) {
      lse = Real(sink);
    } else if (above < 60) {
      const double whole = double(sum) + ::exp2(above);
      inverse = Real(1 / whole), lse = Real(reference + ::log(whole));
    } else {  // larger by far
      const double weight = ::exp2(-above), whole = 1 + double(sum) * weight;
      inverse = Real(weight / whole), lse = Real(sink + ::log(whole));
    }
  }
  if (writes) {
    const bool none = sum == Real(0);
    static_cast<Real*>(t.lse)[place] = lse;
    static_cast<RowStats<Real>*>(t.stats)[place] = none ? RowStats<Real>{0, 0} : RowStats<Real>{top, inverse};
  }
  return inverse;
}

}  // namespace attnjourney
