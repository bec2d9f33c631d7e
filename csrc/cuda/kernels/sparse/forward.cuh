// Token-sparse attention: rows of query over the keys that their indices name. A block takes Rows items of a unit
// (task.cuh), so that the heads of a group fill the tiles, and walks the unit's indices in tiles of Keys; what they
// name is copied row by row while the tile before is worked on. Scores and weights pass through shared memory, where
// each thread has some of a row's; outputs stay in registers. Work follows the indices, not the keys that there are: a
// tile without a name costs a barrier. Few units: several blocks share the indices of each (splits), and merge.cuh
// joins what they found. Proofs: tests/emulator/test_sparse.py.
#pragma once
#include "task.cuh"

namespace attnjourney {

// Latent: values are the front of their keys and are copied with them. Without Values: lse and stats alone.
template <class Math_, int D, int Dv, int Rows, int Keys, bool Latent, bool Values = true>
struct SparseForward {
  using Math = Math_;
  using T = typename Math::T;
  using Real = typename Math::Real;
  using Tile = typename Math::template Tile<D>;
  using ValueTile = std::conditional_t<Latent, Tile, typename Math::template Tile<Dv>>;
  using Weights = typename Math::template Weights<Rows, Keys, false>;
  using Gather = SparseGather<Math, Keys>;
  // of a multiprocessor, at least: left alone, ptxas stops at 96 registers and spills
  static constexpr int kBlocks = D == 256 && Rows == 16 ? 1 : Math::kBlocks;
  static constexpr int kRows = Rows, kThreads = Math::kThreads, kPitch = Math::template kPitch<Keys>;
  static constexpr int kPer = SparseThreads<Math, Rows, Keys>::kPer, kPairs = SparseThreads<Math, Rows, Keys>::kPairs;
  static_assert(kPer * Rows % 32 == 0 && kPer <= 32);

  struct Layout {
    int keys, values, scores, weights, factors, names, bytes, tile, value_tile;
    constexpr __host__ __device__ Layout(int head_dim, int v_head_dim)
        : keys(Tile::bytes(Rows, head_dim)),
          values(0),
          scores(0),
          weights(0),
          factors(0),
          names(0),
          bytes(0),
          tile(Tile::bytes(Keys, head_dim)),
          value_tile(Latent || !Values ? 0 : ValueTile::bytes(Keys, v_head_dim)) {
      values = Latent ? keys : keys + Math::kStages * tile;
      scores = keys + Math::kStages * (tile + value_tile);
      weights = scores + Rows * kPitch * static_cast<int>(sizeof(Real));
      factors = weights + Weights::kBytes;
      names = factors + Rows * static_cast<int>(sizeof(Real));
      bytes = names + Math::kStages * Keys * 4;
      if (Latent) value_tile = tile;
    }
  };
  static constexpr int smem_bytes(int head_dim, int v_head_dim) { return Layout(head_dim, v_head_dim).bytes; }
  static constexpr __host__ __device__ int tiles(int items) { return (items + Rows - 1) / Rows; }

  static __device__ __forceinline__ void run(const SparseTask& task) {
    const int tid = threadIdx.x;
    const int head_dim = static_cast<int>(task.params.head_dim), v_head_dim = static_cast<int>(task.params.v_head_dim);
    const Layout at(head_dim, v_head_dim);
    const int row_tiles = tiles(task.group * static_cast<int>(task.params.rows));
    const int splits = task.splits > 1 ? task.splits : 1, block = blockIdx.x / splits;
    const int number = block / row_tiles, first = (block - number * row_tiles) * Rows;
    SparseUnit unit(task, number);
    unit.split = blockIdx.x % splits, unit.splits = splits;
    if (first >= unit.items) return;  // of a block of fewer rows
    unsigned char* const smem = ptx::dynamic_smem();
    const Tile queries(smem, head_dim);
    Real *const scores = reinterpret_cast<Real*>(smem + at.scores), *const factors =
                                                                        reinterpret_cast<Real*>(smem + at.factors);
    const Weights weights{smem + at.weights};
    int* const names = reinterpret_cast<int*>(smem + at.names);
    const T* const key = static_cast<const T*>(task.key) + unit.batch * task.k.batch + unit.head * task.k.head;
    const T* const value = static_cast<const T*>(task.value) + unit.batch * task.v.batch + unit.head * task.v.head;
    const auto keys_of = [&](int stage) { return Tile(smem + at.keys + stage * at.tile, head_dim); };
    const auto values_of = [&](int stage) {
      return ValueTile(smem + at.values + stage * at.value_tile, Latent ? head_dim : v_head_dim);
    };
    const auto start = [&](int fetched, int stage) {
      const Tile k = keys_of(stage);
      const ValueTile v = values_of(stage);
      Gather::start(fetched, names + stage * Keys, [&](int slot, int name) {
        load_named(k, slot, key, task.k.row, name, head_dim);
        if constexpr (Values && !Latent) load_named(v, slot, value, task.v.row, name, v_head_dim);
      });
      Math::commit();
    };

    load_items<Math, Rows>(queries, task, unit, task.query, task.q, first, head_dim);
    Math::commit();
    const int row = tid / kPer, own = tid % kPer, limit = unit.limit(task, row < Rows ? first + row : unit.items);
    const bool hides = unit.hides(task);
    typename Math::template Sums<Rows, Dv> sums;
    Real top = -Real(INFINITY), sum = 0;  // sum: of this thread's keys
    Gather::walk(task, unit, names, start, [&](int, int stage, const int* named) {
      Math::template products<Rows, Keys, 0>(scores, queries, keys_of(stage), head_dim);
      __syncthreads();  // @scores_there
      if (row < Rows) softmax(task, scores + row * kPitch, named, weights, row, own, limit, top, sum, factors[row]);
      __syncthreads();  // @weights_there
      if constexpr (Values) {
        sums.shrink(factors);
        sums.add(weights, values_of(stage), v_head_dim, hides);
      }
    });
    if (row < Rows) {
#pragma unroll
      for (int w = kPer / 2; w > 0; w /= 2) sum += ptx::shfl_xor(sum, w);
    }
    __syncthreads();  // @factors_read
    const int64_t before = unit.split * sparse_rows(task);
    if (row < Rows && first + row < unit.items && own == 0) {
      const int64_t place = unit.place(task, first + row);
      if (splits > 1)
        factors[row] = 1, static_cast<RowStats<Real>*>(task.part_stats)[before + place] = {top, sum};
      else
        factors[row] = end_sparse_row(task, place, top, sum, true);
    }
    if constexpr (!Values) return;
    __syncthreads();
    sums.each(v_head_dim, [&](int r, int column, const auto& x) {
      if (first + r >= unit.items) return;
      const int64_t to = (before + unit.place(task, first + r)) * v_head_dim + column;
      if (splits > 1)
        Math::store(static_cast<Real*>(task.part_out) + to, x, factors[r]);
      else
        Math::store(static_cast<T*>(task.out) + to, x, factors[r]);
    });
  }

  // A thread's part of a row of products to weights; kPer threads, which are lanes side by side, have a row.
  static __device__ __forceinline__ void softmax(const SparseTask& task, const Real* products, const int* named,
                                                 const Weights& weights, int row, int own, int limit, Real& top,
                                                 Real& sum, Real& factor) {
    Real x[kPairs][2], largest = top;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; i++) {
      const int key = 2 * (i / 2 * kPer + own) + i % 2;
      const bool seen = named[key] >= 0 && named[key] < limit;
      const Real score = seen ? sparse_score<Real>(task, products[key]) : -Real(INFINITY);
      x[i / 2][i % 2] = score;
      largest = score > largest ? score : largest;
    }
#pragma unroll
    for (int w = kPer / 2; w > 0; w /= 2) {
      const Real other = ptx::shfl_xor(largest, w);
      largest = other > largest ? other : largest;
    }
    const Real base = largest == -Real(INFINITY) ? Real(0) : largest, shrink = ptx::exp2(top - base);
    top = largest;
    Real added = 0;
#pragma unroll
    for (int i = 0; i < kPairs; i++) {
      const Real low = ptx::exp2(x[i][0] - base), high = ptx::exp2(x[i][1] - base);
      added += low + high;
      weights.put(row, 2 * (i * kPer + own), low, high);
    }
    sum = sum * shrink + added;
    if (own == 0) factor = shrink;
  }
};

// grid: tiles of the items of every unit, [batch][kv_heads][blocks][tiles][splits]
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    sparse_forward(const __grid_constant__ SparseTask task) {
  Kernel::run(task);
}

}  // namespace attnjourney
