// Sums over all heads for each key that a row's indices name: of the indexer's scores, and of the weights of the
// attention that it predicts (Target), which needs its statistics. A block takes Keys indices of a row, copies what
// they name once a key head and goes over the heads, Rows at a time.
#pragma once
#include "indexer_task.cuh"

namespace attnjourney {

template <class Math_, int D, int Rows, int Keys, bool Target>
struct IndexerColumns {
  using Math = Math_;
  using T = typename Math::T;
  using Real = typename Math::Real;
  using Tile = typename Math::template Tile<D>;
  using Gather = SparseGather<Math, Keys>;
  static constexpr int kKeys = Keys, kThreads = Math::kThreads, kPitch = Math::template kPitch<Keys>;
  static constexpr int kShare = kThreads / Keys;  // threads of a key
  static_assert(kThreads % Keys == 0);

  struct Layout {
    int queries, tile, products, sums, names, bytes;
    constexpr __host__ __device__ Layout(int head_dim)
        : queries(Tile::bytes(Keys, head_dim)),
          tile(Tile::bytes(Rows, head_dim)),
          products(0),
          sums(0),
          names(0),
          bytes(0) {
      products = queries + Math::kStages * tile;
      sums = products + Rows * kPitch * static_cast<int>(sizeof(Real));
      names = sums + kThreads * static_cast<int>(sizeof(Real));
      bytes = names + Keys * 4;
    }
  };
  static constexpr int smem_bytes(int head_dim) { return Layout(head_dim).bytes; }

  static __device__ __forceinline__ void run(const IndexerTask& all) {
    const SparseTask& task = Target ? all.attention : all.index;
    const int tid = threadIdx.x;
    const int head_dim = static_cast<int>(task.params.head_dim);
    const Layout at(head_dim);
    const auto tiles = static_cast<int>((task.params.index_count + Keys - 1) / Keys);
    const int number = blockIdx.x / tiles, tile = blockIdx.x - number * tiles, batch = number / task.blocks;
    unsigned char* const smem = ptx::dynamic_smem();
    const Tile keys(smem, head_dim);
    Real *const products = reinterpret_cast<Real*>(smem + at.products), *const sums =
                                                                            reinterpret_cast<Real*>(smem + at.sums);
    int* const names = reinterpret_cast<int*>(smem + at.names);
    const int own = tid % Keys, share = tid / Keys;
    Real sum = 0;
    for (int head = 0; head < task.kv_heads; head++) {
      const SparseUnit unit(task, batch, head, number % task.blocks);
      const T* const key = static_cast<const T*>(task.key) + batch * task.k.batch + head * task.k.head;
      const auto start = [&](int item0, int stage) {
        load_items<Math, Rows>(Tile(smem + at.queries + stage * at.tile, head_dim), task, unit, task.query, task.q,
                               item0, head_dim);
        Math::commit();
      };
      Gather::start(Gather::fetch(task, unit, tile), names,
                    [&](int slot, int name) { load_named(keys, slot, key, task.k.row, name, head_dim); });
      start(0, 0);
      for (int item0 = 0; item0 < unit.items; item0 += Rows) {
        const int stage = Math::kStages > 1 ? item0 / Rows & 1 : 0;
        if (Math::kStages == 1 && item0 > 0) start(item0, 0);
        Math::wait();
        __syncthreads();  // @rows_landed: with the keys; every thread is past the products before
        if (Math::kStages > 1 && item0 + Rows < unit.items) start(item0 + Rows, stage ^ 1);
        Math::template products<Rows, Keys, 0>(products, Tile(smem + at.queries + stage * at.tile, head_dim), keys,
                                               head_dim);
        __syncthreads();  // @products_there
        for (int r = share; r < Rows && item0 + r < unit.items; r += kShare) {
          const Real product = products[r * kPitch + own];
          if constexpr (Target) {
            const auto& stats = static_cast<const RowStats<Real>*>(task.stats)[unit.place(task, item0 + r)];
            sum += ptx::exp2(sparse_score<Real>(task, product) - stats.reference) * stats.inverse;
          } else {
            sum += weighed(static_cast<const Real*>(all.weights)[unit.place(task, item0 + r)],
                           product * static_cast<Real>(task.params.scale));
          }
        }
      }
    }
    Math::wait();  // without any head, the keys are still on their way
    sums[tid] = sum;
    __syncthreads();  // @sums_there
    const int64_t slot = int64_t{tile} * Keys + own;
    if (share > 0 || slot >= task.params.index_count) return;
    for (int s = 1; s < kShare; s++) sum += sums[s * Keys + own];
    Real* const to = static_cast<Real*>(Target ? all.target : all.grad_scores);
    to[int64_t{number} * task.params.index_count + slot] = sum;  // without a name: of zeros
  }
};

// grid: [batch][q_len][tiles of Keys indices]
template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::Math::kBlocks)
    indexer_columns(const __grid_constant__ IndexerTask task) {
  Kernel::run(task);
}

// The loss of a row and its derivative by the scores, of both distributions. grid: [batch][q_len]; shared memory: a
// number of 8 bytes for each warp
constexpr int kLossThreads = 128;
template <class Real>
__global__ void __launch_bounds__(kLossThreads) indexer_loss(const __grid_constant__ IndexerTask task) {
  Real* const parts = reinterpret_cast<Real*>(ptx::dynamic_smem());
  const SparseUnit unit(task.index, blockIdx.x / task.index.blocks, 0, blockIdx.x % task.index.blocks);
  const int64_t count = task.index.params.index_count;
  const Real* const target = static_cast<const Real*>(task.target) + blockIdx.x * count;
  Real* const scores = static_cast<Real*>(task.grad_scores) + blockIdx.x * count;
  const int tid = threadIdx.x;
  const auto reduce = [&](Real own, auto&& join) {
#pragma unroll
    for (int w = 16; w > 0; w /= 2) own = join(own, ptx::shfl_xor(own, w));
    if (tid % 32 == 0) parts[tid / 32] = own;
    __syncthreads();
    own = parts[0];
    for (int w = 1; w < kLossThreads / 32; w++) own = join(own, parts[w]);
    __syncthreads();  // @loss_parts_read
    return own;
  };
  const auto add = [](Real a, Real b) { return a + b; };
  const auto each = [&](auto&& f) {
    for (int64_t i = tid; i < count; i += kLossThreads)
      if (unit.name(task.index, static_cast<int>(i)) >= 0) f(i);
  };
  Real top = -Real(INFINITY), sum = 0, weights = 0, loss = 0;
  each([&](int64_t i) { top = scores[i] > top ? scores[i] : top, sum += target[i]; });
  top = reduce(top, [](Real a, Real b) { return b > a ? b : a; });
  sum = reduce(sum, add);
  const Real base = (top == -Real(INFINITY) ? Real(0) : top) * Real(log2_e),
             inverse = sum == Real(0) ? Real(0) : 1 / sum;
  each([&](int64_t i) { weights += ptx::exp2(scores[i] * Real(log2_e) - base); });
  weights = reduce(weights, add);
  const Real of_sum = ptx::log2(weights), factor = 1 / weights;
  each([&](int64_t i) {
    const Real p = target[i] * inverse, logit = scores[i] * Real(log2_e) - base - of_sum;
    if (p != Real(0)) loss += p * (ptx::log2(p) - logit);
  });
  loss = reduce(loss, add);
  for (int64_t i = tid; i < count; i += kLossThreads) {
    const bool there = unit.name(task.index, static_cast<int>(i)) >= 0;
    scores[i] = there ? ptx::exp2(scores[i] * Real(log2_e) - base) * factor - target[i] * inverse : Real(0);
  }
  if (tid == 0) static_cast<Real*>(task.loss)[blockIdx.x] = loss * Real(ln_2);
}

}  // namespace attnjourney
