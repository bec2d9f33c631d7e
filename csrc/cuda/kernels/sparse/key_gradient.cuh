// What each pair adds to the gradients of its key and value: a block takes a tile of Keys names of a unit, copies what
// they name once and walks the unit's items, Rows at a time: dV = P^T dO and dK = dS^T Q in registers. The sums over
// the items are a pair's; they go to where the lists (lists.cuh) have the pair, and key_sums.cuh adds them up in the
// order of the rows.
#pragma once
#include "backward_row.cuh"
#include "lists.cuh"

namespace attnjourney {

struct SparsePairs {
  SparseLists lists;
  void* pairs;        // [batch][kv_heads][most][head_dim + v_head_dim] in the type of the arithmetic
  int64_t most;       // pairs of a head of a part
  void *key, *value;  // [batch][kv_heads][kv_len][head_dim], [..][v_head_dim]: sums, in the same type; null: not wanted
  bool begins;        // the first part: sums begin here
};

template <class Math_, int D, int Dv, int Rows, int Keys, bool Latent>
struct SparseKeyGradient {
  using Math = Math_;
  using T = typename Math::T;
  using Real = typename Math::Real;
  using Tile = typename Math::template Tile<D>;
  using OutTile = typename Math::template Tile<Dv>;
  using ValueTile = std::conditional_t<Latent, Tile, OutTile>;
  using Weights = typename Math::template Weights<Rows, Keys, true>;
  using Gather = SparseGather<Math, Keys>;
  // of a multiprocessor, at least: left alone, ptxas stops at 80 registers and spills
  static constexpr int kBlocks = D == 64 ? 1 : Math::kBlocks;
  static constexpr int kKeys = Keys, kThreads = Math::kThreads, kPitch = Math::template kPitch<Keys>;
  static constexpr int kPer = SparseThreads<Math, Rows, Keys>::kPer, kPairs = SparseThreads<Math, Rows, Keys>::kPairs;

  struct Layout {
    int values, queries, grads, products, weights, gradients, names, times, bytes, tile, out_tile;
    constexpr __host__ __device__ Layout(int head_dim, int v_head_dim)
        : values(Latent ? 0 : Tile::bytes(Keys, head_dim)),
          queries(Tile::bytes(Keys, head_dim) + (Latent ? 0 : ValueTile::bytes(Keys, v_head_dim))),
          grads(0),
          products(0),
          weights(0),
          gradients(0),
          names(0),
          times(0),
          bytes(0),
          tile(Tile::bytes(Rows, head_dim)),
          out_tile(OutTile::bytes(Rows, v_head_dim)) {
      grads = queries + Math::kStages * tile;
      products = grads + Math::kStages * out_tile;
      weights = products + 2 * Rows * kPitch * static_cast<int>(sizeof(Real));
      gradients = weights + Weights::kBytes;
      names = gradients + Weights::kBytes;
      times = names + Keys * 4;
      bytes = times + Keys * 4;
    }
  };
  static constexpr int smem_bytes(int head_dim, int v_head_dim) { return Layout(head_dim, v_head_dim).bytes; }

  // How often the row names a key that slot `slot` names, -1: an earlier slot does, too, and stands for all. One warp.
  static __device__ __forceinline__ int times_named(const SparseTask& task, const SparseUnit& unit, int slot, int key) {
    int times = 0;
    bool earlier = false;
    for (int64_t i = threadIdx.x % 32; i < task.params.index_count; i += 32) {
      const bool same = unit.name(task, static_cast<int>(i)) == key;
      times += same;
      earlier = earlier || (same && i < slot);
    }
    times = static_cast<int>(warp_sum(static_cast<float>(times)));
    return ptx::any(earlier) ? -1 : times;
  }

  static __device__ __forceinline__ void run(const SparseTask& task, const SparsePairs& to) {
    const int tid = threadIdx.x, lane = tid % 32;
    const int head_dim = static_cast<int>(task.params.head_dim), v_head_dim = static_cast<int>(task.params.v_head_dim);
    const Layout at(head_dim, v_head_dim);
    const SparseLists& lists = to.lists;
    const auto key_tiles = static_cast<int>((task.params.index_count + Keys - 1) / Keys);
    const int number = blockIdx.x / key_tiles, tile = blockIdx.x - number * key_tiles, part_row = number % lists.rows;
    const SparseUnit unit(task, number / lists.rows / task.kv_heads, number / lists.rows % task.kv_heads,
                          lists.first + part_row);
    unsigned char* const smem = ptx::dynamic_smem();
    const Tile keys(smem, head_dim);
    const ValueTile values(smem + at.values, Latent ? head_dim : v_head_dim);
    Real *const products = reinterpret_cast<Real*>(smem + at.products), *const of_values = products + Rows * kPitch;
    const Weights weights{smem + at.weights}, gradients{smem + at.gradients};
    int *const names = reinterpret_cast<int*>(smem + at.names), *const times = reinterpret_cast<int*>(smem + at.times);
    const T* const key = static_cast<const T*>(task.key) + unit.batch * task.k.batch + unit.head * task.k.head;
    const T* const value = static_cast<const T*>(task.value) + unit.batch * task.v.batch + unit.head * task.v.head;
    const auto queries_of = [&](int stage) { return Tile(smem + at.queries + stage * at.tile, head_dim); };
    const auto grads_of = [&](int stage) { return OutTile(smem + at.grads + stage * at.out_tile, v_head_dim); };
    const auto start = [&](int item0, int stage) {
      load_items<Math, Rows>(queries_of(stage), task, unit, task.query, task.q, item0, head_dim);
      load_items<Math, Rows>(grads_of(stage), task, unit, task.grad_out, task.g, item0, v_head_dim);
      Math::commit();
    };

    const int64_t list = lists.list(unit.batch, unit.head);
    const bool repeats = lists.repeats[list * lists.words + part_row / 32] >> part_row % 32 & 1;
    Gather::start(Gather::fetch(task, unit, tile), names, [&](int slot, int name) {
      load_named(keys, slot, key, task.k.row, name, head_dim);
      if constexpr (!Latent) load_named(values, slot, value, task.v.row, name, v_head_dim);
      const int often = repeats && name >= 0 ? times_named(task, unit, tile * Keys + slot, name) : 1;
      if (lane == 0) times[slot] = often;
    });

    const int row = tid / kPer, own = tid % kPer;
    const bool hides = unit.hides(task);
    typename Math::template Sums<Keys, D> of_key;
    typename Math::template Sums<Keys, Dv> of_value;
    Gather::template walk_items<Rows>(unit, names, start, [&](int item0, int stage) {
      const SparseRow<Real> stats(task, unit, row < Rows ? item0 + row : unit.items);
      Math::template products<Rows, Keys, 0>(products, queries_of(stage), keys, head_dim);
      Math::template products<Rows, Keys, Math::kWarps / 2>(of_values, grads_of(stage), values, v_head_dim);
      __syncthreads();  // @products_there
      if (row < Rows) {
#pragma unroll
        for (int i = 0; i < kPairs; i++) {
          const int k = 2 * (i * kPer + own), place = row * kPitch + k;
          Real weight[2], gradient[2];
#pragma unroll
          for (int e = 0; e < 2; e++)
            stats.pair(task, names[k + e], products[place + e], of_values[place + e], weight[e], gradient[e]);
          weights.put(row, k, weight[0], weight[1]);
          gradients.put(row, k, gradient[0], gradient[1]);
        }
      }
      __syncthreads();  // @weights_there
      of_value.add(weights, grads_of(stage), v_head_dim, hides);
      of_key.add(gradients, queries_of(stage), head_dim, hides);
    });
    Real* const pairs = static_cast<Real*>(to.pairs) +
                        (int64_t{unit.batch} * task.kv_heads + unit.head) * to.most * (head_dim + v_head_dim);
    const auto write = [&](const auto& sums, int dim, int offset, Real scale) {
      sums.each(dim, [&](int k, int column, const auto& x) {
        if (names[k] < 0 || times[k] < 0) return;
        const int64_t place = lists.place(task, list, part_row, names[k]);
        Math::store(pairs + place * (head_dim + v_head_dim) + offset + column, x, scale * static_cast<Real>(times[k]));
      });
    };
    write(of_key, head_dim, 0, static_cast<Real>(task.params.scale));
    write(of_value, v_head_dim, head_dim, Real(1));
  }
};

// grid: [batch][kv_heads][rows of the part][tiles of Keys names]
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    sparse_key_gradient(const __grid_constant__ SparseTask task, const __grid_constant__ SparsePairs pairs) {
  Kernel::run(task, pairs);
}

}  // namespace attnjourney
