// The gradient of query of token-sparse attention: the forward's walk over the indices of a unit (forward.cuh), with
// weights from its statistics, and dQ = dS K in registers.
#pragma once
#include "backward_row.cuh"

namespace attnjourney {

template <class Math_, int D, int Dv, int Rows, int Keys, bool Latent>
struct SparseQueryGradient {
  using Math = Math_;
  using T = typename Math::T;
  using Real = typename Math::Real;
  using Tile = typename Math::template Tile<D>;
  using OutTile = typename Math::template Tile<Dv>;
  using ValueTile = std::conditional_t<Latent, Tile, OutTile>;
  using Weights = typename Math::template Weights<Rows, Keys, false>;
  using Gather = SparseGather<Math, Keys>;
  static constexpr int kRows = Rows, kThreads = Math::kThreads, kPitch = Math::template kPitch<Keys>;
  static constexpr int kPer = kThreads / Rows < Keys / 2 ? kThreads / Rows : Keys / 2;  // threads of a row
  static constexpr int kPairs = Keys / 2 / kPer;
  static_assert(kPer * Rows <= kThreads && Keys / 2 % kPer == 0);

  struct Layout {
    int grads, keys, values, products, weights, names, bytes, tile, value_tile;
    constexpr __host__ __device__ Layout(int head_dim, int v_head_dim)
        : grads(Tile::bytes(Rows, head_dim)),
          keys(grads + OutTile::bytes(Rows, v_head_dim)),
          values(0),
          products(0),
          weights(0),
          names(0),
          bytes(0),
          tile(Tile::bytes(Keys, head_dim)),
          value_tile(Latent ? 0 : ValueTile::bytes(Keys, v_head_dim)) {
      values = Latent ? keys : keys + Math::kStages * tile;
      products = keys + Math::kStages * (tile + value_tile);
      weights = products + 2 * Rows * kPitch * static_cast<int>(sizeof(Real));
      names = weights + Weights::kBytes;
      bytes = names + Math::kStages * Keys * 4;
      if (Latent) value_tile = tile;
    }
  };
  static constexpr int smem_bytes(int head_dim, int v_head_dim) { return Layout(head_dim, v_head_dim).bytes; }
  static constexpr __host__ __device__ int tiles(int items) { return (items + Rows - 1) / Rows; }

  static __device__ __forceinline__ void run(const SparseTask& task) {
    const int tid = threadIdx.x, warp = tid / 32;
    const int head_dim = static_cast<int>(task.params.head_dim), v_head_dim = static_cast<int>(task.params.v_head_dim);
    const Layout at(head_dim, v_head_dim);
    const int row_tiles = tiles(task.group * static_cast<int>(task.params.rows));
    const int number = blockIdx.x / row_tiles, first = (blockIdx.x - number * row_tiles) * Rows;
    const SparseUnit unit(task, number / task.blocks / task.kv_heads, number / task.blocks % task.kv_heads,
                          number % task.blocks);
    if (first >= unit.items) return;
    unsigned char* const smem = ptx::dynamic_smem();
    const Tile queries(smem, head_dim);
    const OutTile grads(smem + at.grads, v_head_dim);
    Real *const products = reinterpret_cast<Real*>(smem + at.products), *const of_values = products + Rows * kPitch;
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
        const bool valid = name >= 0;
        k.load(slot, key + (valid ? name * task.k.row : 0), valid, head_dim);
        if constexpr (!Latent) v.load(slot, value + (valid ? name * task.v.row : 0), valid, v_head_dim);
      });
      Math::commit();
    };
    for (int r = warp; r < Rows; r += Math::kWarps) {
      const bool valid = first + r < unit.items;
      const int item = valid ? first + r : first;
      queries.load(r, unit.row_in<T>(task.query, task.q, task, item), valid, head_dim);
      grads.load(r, unit.row_in<T>(task.grad_out, task.g, task, item), valid, v_head_dim);
    }
    Math::commit();
    const int count = static_cast<int>((task.params.index_count + Keys - 1) / Keys);
    int fetched = count > 0 ? Gather::fetch(task, unit, 0) : -1;
    if (Math::kStages > 1 && count > 0) {
      start(fetched, 0);
      fetched = Gather::fetch(task, unit, 1);
    }
    const int row = tid / kPer, own = tid % kPer;
    const SparseRow<Real> stats(task, unit, row < Rows ? first + row : unit.items);
    const bool hides = unit.hides(task);
    typename Math::template Sums<Rows, D> sums;
    for (int tile = 0; tile < count; tile++) {
      const int stage = Math::kStages > 1 ? tile & 1 : 0;
      if (Math::kStages == 1) {
        __syncthreads();  // @tile_read: every thread is past the tile before
        start(fetched, 0);
        fetched = Gather::fetch(task, unit, tile + 1);
      }
      Math::wait();
      __syncthreads();  // @tile_landed: with query and grad_out; every thread is past the tile before
      if (Math::kStages > 1 && tile + 1 < count) {
        start(fetched, stage ^ 1);
        fetched = Gather::fetch(task, unit, tile + 2);
      }
      const int* const named = names + stage * Keys;
      if (!Gather::any(named)) continue;
      Math::template products<Rows, Keys, 0>(products, queries, keys_of(stage), head_dim);
      Math::template products<Rows, Keys, Math::kWarps / 2>(of_values, grads, values_of(stage), v_head_dim);
      __syncthreads();  // @products_there
      if (row < Rows) {
#pragma unroll
        for (int i = 0; i < kPairs; i++) {
          const int k = 2 * (i * kPer + own), place = row * kPitch + k;
          Real weight, gradient[2];
#pragma unroll
          for (int e = 0; e < 2; e++)
            stats.pair(task, named[k + e], products[place + e], of_values[place + e], weight, gradient[e]);
          weights.put(row, k, gradient[0], gradient[1]);
        }
      }
      __syncthreads();  // @gradients_there
      sums.add(weights, keys_of(stage), head_dim, hides);
    }
    Math::wait();
    const auto scale = static_cast<Real>(task.params.scale);
    sums.each(head_dim, [&](int r, int column, const auto& x) {
      if (first + r >= unit.items) return;
      Math::store(static_cast<T*>(task.grad_query) + unit.place(task, first + r) * head_dim + column, x, scale);
    });
  }
};

// grid: as sparse_forward's
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::Math::kBlocks)
    sparse_query_gradient(const __grid_constant__ SparseTask task) {
  Kernel::run(task);
}

}  // namespace attnjourney
