// The gradients of the indexer's loss: dS = grad_loss * grad_scores by a row's scores, and G = dS * weight where scale
// * q . k is above 0. dQ = scale G K and the weights' gradient in blocks of Rows heads of a row, which walk its
// indices; what each pair adds to dK = scale G^T Q in blocks of Keys indices, as in key_gradient.cuh.
#pragma once
#include "indexer_task.cuh"
#include "key_sums.cuh"

namespace attnjourney {

template <class Math_, int D, int Rows, int Keys>
struct IndexerQueryGradient {
  using Math = Math_;
  using T = typename Math::T;
  using Real = typename Math::Real;
  using Tile = typename Math::template Tile<D>;
  using Weights = typename Math::template Weights<Rows, Keys, false>;
  using Gather = SparseGather<Math, Keys>;
  static constexpr int kRows = Rows, kThreads = Math::kThreads, kPitch = Math::template kPitch<Keys>;
  static constexpr int kPer = SparseThreads<Math, Rows, Keys>::kPer, kPairs = SparseThreads<Math, Rows, Keys>::kPairs;
  static_assert(kPer <= 32);

  struct Layout {
    int keys, tile, products, weights, names, bytes;
    constexpr __host__ __device__ Layout(int head_dim)
        : keys(Tile::bytes(Rows, head_dim)),
          tile(Tile::bytes(Keys, head_dim)),
          products(keys + Math::kStages * tile),
          weights(products + Rows * kPitch * static_cast<int>(sizeof(Real))),
          names(weights + Weights::kBytes),
          bytes(names + Math::kStages * Keys * 4) {}
  };
  static constexpr int smem_bytes(int head_dim) { return Layout(head_dim).bytes; }
  static constexpr __host__ __device__ int tiles(int items) { return (items + Rows - 1) / Rows; }

  static __device__ __forceinline__ void run(const IndexerTask& all) {
    const SparseTask& task = all.index;
    const int tid = threadIdx.x, head_dim = static_cast<int>(task.params.head_dim);
    const Layout at(head_dim);
    const int row_tiles = tiles(task.group), number = blockIdx.x / row_tiles;
    const int first = (blockIdx.x - number * row_tiles) * Rows;
    const SparseUnit unit(task, number / task.blocks, 0, number % task.blocks);
    unsigned char* const smem = ptx::dynamic_smem();
    const Tile queries(smem, head_dim);
    Real* const products = reinterpret_cast<Real*>(smem + at.products);
    const Weights weights{smem + at.weights};
    int* const names = reinterpret_cast<int*>(smem + at.names);
    const T* const key = static_cast<const T*>(task.key) + unit.batch * task.k.batch;
    const auto keys_of = [&](int stage) { return Tile(smem + at.keys + stage * at.tile, head_dim); };
    const auto start = [&](int fetched, int stage) {
      const Tile k = keys_of(stage);
      Gather::start(fetched, names + stage * Keys,
                    [&](int slot, int name) { load_named(k, slot, key, task.k.row, name, head_dim); });
      Math::commit();
    };
    load_items<Math, Rows>(queries, task, unit, task.query, task.q, first, head_dim);
    Math::commit();
    const int row = tid / kPer, own = tid % kPer;
    const bool there = row < Rows && first + row < unit.items;
    const Real weight = there ? static_cast<const Real*>(all.weights)[unit.place(task, first + row)] : Real(0);
    const Real grad = static_cast<const Real*>(all.grad_loss)[number], scale = static_cast<Real>(task.params.scale);
    const Real* const grad_scores = static_cast<const Real*>(all.grad_scores) + number * task.params.index_count;
    Real of_weight = 0;
    typename Math::template Sums<Rows, D> sums;
    Gather::walk(task, unit, names, start, [&](int tile, int stage, const int* named) {
      Math::template products<Rows, Keys, 0>(products, queries, keys_of(stage), head_dim);
      __syncthreads();  // @products_there
      if (row < Rows) {
#pragma unroll
        for (int i = 0; i < kPairs; i++) {
          Real gradient[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int k = 2 * (i * kPer + own) + e;
            const Real score = products[row * kPitch + k] * scale;
            const Real d = named[k] >= 0 ? grad * grad_scores[int64_t{tile} * Keys + k] : Real(0);
            if (named[k] >= 0) of_weight += weighed(d, score);
            gradient[e] = score <= Real(0) ? Real(0) : d * weight;
          }
          weights.put(row, 2 * (i * kPer + own), gradient[0], gradient[1]);
        }
      }
      __syncthreads();  // @gradients_there
      sums.add(weights, keys_of(stage), head_dim, true);
    });
    if (row < Rows) {
#pragma unroll
      for (int w = kPer / 2; w > 0; w /= 2) of_weight += ptx::shfl_xor(of_weight, w);
      if (there && own == 0 && all.grad_weights)
        static_cast<Real*>(all.grad_weights)[unit.place(task, first + row)] = of_weight;
    }
    if (!task.grad_query) return;
    sums.each(head_dim, [&](int r, int column, const auto& x) {
      if (first + r >= unit.items) return;
      Math::store(static_cast<T*>(task.grad_query) + unit.place(task, first + r) * head_dim + column, x, scale);
    });
  }
};

template <class Math_, int D, int Rows, int Keys>
struct IndexerKeyGradient {
  using Math = Math_;
  using T = typename Math::T;
  using Real = typename Math::Real;
  using Tile = typename Math::template Tile<D>;
  using Weights = typename Math::template Weights<Rows, Keys, true>;
  using Gather = SparseGather<Math, Keys>;
  static constexpr int kKeys = Keys, kThreads = Math::kThreads, kPitch = Math::template kPitch<Keys>;
  static constexpr int kPer = SparseThreads<Math, Rows, Keys>::kPer, kPairs = SparseThreads<Math, Rows, Keys>::kPairs;

  struct Layout {
    int queries, tile, products, weights, names, grads, bytes;
    constexpr __host__ __device__ Layout(int head_dim)
        : queries(Tile::bytes(Keys, head_dim)),
          tile(Tile::bytes(Rows, head_dim)),
          products(queries + Math::kStages * tile),
          weights(products + Rows * kPitch * static_cast<int>(sizeof(Real))),
          names(weights + Weights::kBytes),
          grads(names + Keys * 8),
          bytes(grads + Keys * static_cast<int>(sizeof(Real))) {}
  };
  static constexpr int smem_bytes(int head_dim) { return Layout(head_dim).bytes; }

  // The derivative by a key's score, of all slots that name it; first: no earlier slot does. One warp.
  static __device__ __forceinline__ Real of_all(const SparseTask& task, const SparseUnit& unit, int slot, int key,
                                                const Real* grad_scores, bool& first) {
    Real sum = 0;
    bool earlier = false;
    for (int64_t i = threadIdx.x % 32; i < task.params.index_count; i += 32)
      if (unit.name(task, static_cast<int>(i)) == key) sum += grad_scores[i], earlier = earlier || i < slot;
    first = !ptx::any(earlier);
    return warp_sum(sum);
  }

  static __device__ __forceinline__ void run(const IndexerTask& all, const SparsePairs& to) {
    const SparseTask& task = all.index;
    const int tid = threadIdx.x, lane = tid % 32, head_dim = static_cast<int>(task.params.head_dim);
    const Layout at(head_dim);
    const SparseLists& lists = to.lists;
    const auto key_tiles = static_cast<int>((task.params.index_count + Keys - 1) / Keys);
    const int number = blockIdx.x / key_tiles, tile = blockIdx.x - number * key_tiles, part_row = number % lists.rows;
    const SparseUnit unit(task, number / lists.rows, 0, lists.first + part_row);
    unsigned char* const smem = ptx::dynamic_smem();
    const Tile keys(smem, head_dim);
    Real* const products = reinterpret_cast<Real*>(smem + at.products);
    const Weights gradients{smem + at.weights};
    int *const names = reinterpret_cast<int*>(smem + at.names), *const firsts = names + Keys;
    Real* const grads = reinterpret_cast<Real*>(smem + at.grads);
    const T* const key = static_cast<const T*>(task.key) + unit.batch * task.k.batch;
    const int64_t row_number = int64_t{unit.batch} * task.blocks + unit.block;
    const Real grad = static_cast<const Real*>(all.grad_loss)[row_number], scale = static_cast<Real>(task.params.scale);
    const Real* const grad_scores = static_cast<const Real*>(all.grad_scores) + row_number * task.params.index_count;
    const auto queries_of = [&](int stage) { return Tile(smem + at.queries + stage * at.tile, head_dim); };
    const auto start = [&](int item0, int stage) {
      load_items<Math, Rows>(queries_of(stage), task, unit, task.query, task.q, item0, head_dim);
      Math::commit();
    };
    const int64_t list = lists.list(unit.batch, 0);
    const bool repeats = lists.repeats[list * lists.words + part_row / 32] >> part_row % 32 & 1;
    Gather::start(Gather::fetch(task, unit, tile), names, [&](int slot, int name) {
      const bool valid = name >= 0;
      load_named(keys, slot, key, task.k.row, name, head_dim);
      bool first = true;
      Real own = valid ? grad_scores[int64_t{tile} * Keys + slot] : Real(0);
      if (repeats && valid) own = of_all(task, unit, tile * Keys + slot, name, grad_scores, first);
      if (lane == 0) grads[slot] = grad * own, firsts[slot] = first;
    });
    const int row = tid / kPer, own = tid % kPer;
    typename Math::template Sums<Keys, D> sums;
    Gather::template walk_items<Rows>(unit, names, start, [&](int item0, int stage) {
      Math::template products<Rows, Keys, 0>(products, queries_of(stage), keys, head_dim);
      __syncthreads();  // @key_products_there
      if (row < Rows) {
        const bool there = item0 + row < unit.items;
        const Real weight = there ? static_cast<const Real*>(all.weights)[unit.place(task, item0 + row)] : Real(0);
#pragma unroll
        for (int i = 0; i < kPairs; i++) {
          Real gradient[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int k = 2 * (i * kPer + own) + e;
            const bool above = there && names[k] >= 0 && !(products[row * kPitch + k] * scale <= Real(0));
            gradient[e] = above ? grads[k] * weight : Real(0);
          }
          gradients.put(row, 2 * (i * kPer + own), gradient[0], gradient[1]);
        }
      }
      __syncthreads();  // @key_gradients_there
      sums.add(gradients, queries_of(stage), head_dim, true);
    });
    Real* const pairs = static_cast<Real*>(to.pairs) + unit.batch * to.most * head_dim;
    sums.each(head_dim, [&](int k, int column, const auto& x) {
      if (names[k] < 0 || !firsts[k]) return;
      Math::store(pairs + lists.place(task, list, part_row, names[k]) * head_dim + column, x, scale);
    });
  }
};

// grid: [batch][q_len][tiles of Rows heads]
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::Math::kBlocks)
    indexer_query_gradient(const __grid_constant__ IndexerTask task) {
  Kernel::run(task);
}
// grid: [batch][rows of the part][tiles of Keys indices]
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    indexer_key_gradient(const __grid_constant__ IndexerTask task, const __grid_constant__ SparsePairs pairs) {
  Kernel::run(task, pairs);
}

}  // namespace attnjourney
