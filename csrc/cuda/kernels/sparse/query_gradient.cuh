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
  // of a multiprocessor, at least: left alone, ptxas stops at 80 registers and spills
  static constexpr int kBlocks = D == 128 && Rows == 16 ? 1 : Math::kBlocks;
  static constexpr int kRows = Rows, kThreads = Math::kThreads, kPitch = Math::template kPitch<Keys>;
  static constexpr int kPer = SparseThreads<Math, Rows, Keys>::kPer, kPairs = SparseThreads<Math, Rows, Keys>::kPairs;

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
    const int tid = threadIdx.x;
    const int head_dim = static_cast<int>(task.params.head_dim), v_head_dim = static_cast<int>(task.params.v_head_dim);
    const Layout at(head_dim, v_head_dim);
    const int row_tiles = tiles(task.group * static_cast<int>(task.params.rows));
    const int number = blockIdx.x / row_tiles, first = (blockIdx.x - number * row_tiles) * Rows;
    const SparseUnit unit(task, number);
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
        load_named(k, slot, key, task.k.row, name, head_dim);
        if constexpr (!Latent) load_named(v, slot, value, task.v.row, name, v_head_dim);
      });
      Math::commit();
    };
    load_items<Math, Rows>(queries, task, unit, task.query, task.q, first, head_dim);
    load_items<Math, Rows>(grads, task, unit, task.grad_out, task.g, first, v_head_dim);
    Math::commit();
    const int row = tid / kPer, own = tid % kPer;
    const SparseRow<Real> stats(task, unit, row < Rows ? first + row : unit.items);
    const bool hides = unit.hides(task);
    typename Math::template Sums<Rows, D> sums;
    Gather::walk(task, unit, names, start, [&](int, int stage, const int* named) {
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
    });
    const auto scale = static_cast<Real>(task.params.scale);
    sums.each(head_dim, [&](int r, int column, const auto& x) {
      if (first + r >= unit.items) return;
      Math::store(static_cast<T*>(task.grad_query) + unit.place(task, first + r) * head_dim + column, x, scale);
    });
  }
};

// grid: as sparse_forward's
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    sparse_query_gradient(const __grid_constant__ SparseTask task) {
  Kernel::run(task);
}

}  // namespace attnjourney
