// The launch functions of the lightning indexer for one dtype.
#pragma once
#include "cuda/kernels/sparse/indexer_sizes.cuh"
#include "cuda/sizes.h"
#include "cuda/sparse/launch_indexer.h"
#include "sparse_lists.h"

namespace attnjourney {

// f.of with the kernels of a choice
template <class T, class F>
void with_indexer_sizes(const IndexerChoice& c, const F& f) {
  if constexpr (sizeof(T) == 2) {
    if (c.columns == 64) return f.template of<IndexerSizes<T, 64>>();
    if (c.columns == 128) return f.template of<IndexerSizes<T, 128>>();
  }
  f.template of<IndexerFmaSizes<T>>();
}
template <class T, class F>
void with_indexer_targets(const IndexerChoice& c, const F& f) {
  if constexpr (sizeof(T) == 2) {
    if (c.target == 128) return f.template of<IndexerTargets<T, 128>>();
    if (c.target == 256) return f.template of<IndexerTargets<T, 256>>();
    if (c.target == kLatentDim) return f.template of<IndexerTargets<T, kLatentDim>>();
  }
  f.template of<IndexerFmaTargets<T>>();
}

template <class Kernel>
struct Sm80Topk {
  cudaStream_t stream;
  void parts(const TopkTask& t) const {
    launch_kernel(indexer_parts<Kernel>, int64_t{t.batch} * ((t.rows + Kernel::kRows - 1) / Kernel::kRows) * t.parts,
                  Kernel::kThreads,
                  Kernel::smem_bytes(static_cast<int>(t.params.heads), static_cast<int>(t.params.head_dim)), stream, t);
  }
  void select(const TopkTask& t) const {
    launch_kernel(indexer_select<typename Kernel::Real>, int64_t{t.batch} * t.rows, kSelectThreads,
                  kSelectThreads / 32 * 4, stream, t);
  }
};

template <class Kernel>
struct Sm80IndexerKeys : Sm80SparseLists<typename Kernel::Real> {
  void key_gradient(const IndexerTask& t, const SparsePairs& p) const {
    const int64_t tiles = (t.index.params.index_count + Kernel::kKeys - 1) / Kernel::kKeys;
    launch_kernel(indexer_key_gradient<Kernel>, tiles * p.lists.rows * t.index.batch, Kernel::kThreads,
                  Kernel::smem_bytes(static_cast<int>(t.index.params.head_dim)), this->stream, t, p);
  }
};

template <class Kernel>
void launch_columns(const IndexerTask& t, const SparseTask& of, cudaStream_t stream) {
  const int64_t tiles = (of.params.index_count + Kernel::kKeys - 1) / Kernel::kKeys;
  launch_kernel(indexer_columns<Kernel>, tiles * of.batch * of.blocks, Kernel::kThreads,
                Kernel::smem_bytes(static_cast<int>(of.params.head_dim)), stream, t);
}

template <class Sizes>
constexpr bool indexer_fits(int dim) {
  return fits(Sizes::Scores::smem_bytes(dim), true) && fits(Sizes::QueryGradient::smem_bytes(dim), true) &&
         fits(Sizes::KeyGradient::smem_bytes(dim), true);
}
template <class Targets>
constexpr bool targets_fit(int dim) {
  return fits(Targets::Stats::smem_bytes(dim, 0), true) && fits(Targets::Target::smem_bytes(dim), true);
}

// What is done by the kernels of a choice.
struct PlanTopk {
  TopkPlan& plan;
  const IndexerParams& params;
  int batch, blocks;
  int64_t bytes;
  bool one;
  template <class Kernel>
  void with() const {
    plan = TopkPlan(params, batch, Kernel::kRows, Kernel::kKeys, sizeof(typename Kernel::Real), blocks, bytes);
  }
  template <class Sizes>
  void of() const {
    one ? with<typename Sizes::TopkOne>() : with<typename Sizes::Topk>();
  }
};
struct RunTopk {
  const TopkTask& task;
  const TopkPlan& plan;
  cudaStream_t stream;
  bool one;
  template <class Sizes>
  void of() const {
    one ? run_topk(task, plan, Sm80Topk<typename Sizes::TopkOne>{stream})
        : run_topk(task, plan, Sm80Topk<typename Sizes::Topk>{stream});
  }
};
struct RunTargets {
  const IndexerTask& task;
  cudaStream_t stream;
  template <class Targets>
  void of() const {
    using Stats = typename Targets::Stats;
    const SparseTask& t = task.attention;
    launch_kernel(sparse_forward<Stats>, int64_t{t.batch} * t.kv_heads * t.blocks * Stats::tiles(t.group),
                  Stats::kThreads, Stats::smem_bytes(static_cast<int>(t.params.head_dim), 0), stream, t);
    launch_columns<typename Targets::Target>(task, t, stream);
  }
};
struct RunScores {
  const IndexerTask& task;
  cudaStream_t stream;
  template <class Sizes>
  void of() const {
    launch_columns<typename Sizes::Scores>(task, task.index, stream);
  }
};
struct RunQueryGradient {
  const IndexerTask& task;
  cudaStream_t stream;
  template <class Sizes>
  void of() const {
    using Kernel = typename Sizes::QueryGradient;
    const SparseTask& t = task.index;
    launch_kernel(indexer_query_gradient<Kernel>, int64_t{t.batch} * t.blocks * Kernel::tiles(t.group),
                  Kernel::kThreads, Kernel::smem_bytes(static_cast<int>(t.params.head_dim)), stream, task);
  }
};
struct RunKeyGradient {
  const IndexerTask& task;
  const SparsePairs& pairs;
  const SparseParts& parts;
  cudaStream_t stream;
  template <class Sizes>
  void of() const {
    using Launch = Sm80IndexerKeys<typename Sizes::KeyGradient>;
    const Launch launch{{stream}};
    run_key_gradients(task.index, pairs, parts, IndexerKeys<Launch>{task, launch});
  }
};

template <class T>
constexpr bool indexer_sizes_fit() {
  if constexpr (sizeof(T) == 2)
    if (!(indexer_fits<IndexerSizes<T, 64>>(64) && indexer_fits<IndexerSizes<T, 128>>(128) &&
          targets_fit<IndexerTargets<T, 128>>(128) && targets_fit<IndexerTargets<T, 256>>(256) &&
          targets_fit<IndexerTargets<T, kLatentDim>>(kLatentDim)))
      return false;
  return indexer_fits<IndexerFmaSizes<T>>(256) && targets_fit<IndexerFmaTargets<T>>(kLatentDim) &&
         fits(TopkFma<T>::smem_bytes(0, 256), true);
}

template <class T>
struct IndexerOf {
  static TopkPlan plan(const IndexerParams& p, int batch, const IndexerChoice& c, int blocks, int64_t bytes) {
    TopkPlan plan(p, batch, 1, 1, 1, 1, 1);
    with_indexer_sizes<T>(c, PlanTopk{plan, p, batch, blocks, bytes, c.one});
    return plan;
  }
  static void topk(const TopkTask& t, const TopkPlan& plan, const IndexerChoice& c, cudaStream_t stream) {
    with_indexer_sizes<T>(c, RunTopk{t, plan, stream, c.one});
  }
  static void loss(const IndexerTask& t, const IndexerChoice& c, cudaStream_t stream) {
    with_indexer_targets<T>(c, RunTargets{t, stream});
    with_indexer_sizes<T>(c, RunScores{t, stream});
    launch_kernel(indexer_loss<Compute<T>>, int64_t{t.index.batch} * t.index.blocks, kLossThreads,
                  kLossThreads / 32 * 8, stream, t);
  }
  static void query_gradient(const IndexerTask& t, const IndexerChoice& c, cudaStream_t stream) {
    with_indexer_sizes<T>(c, RunQueryGradient{t, stream});
  }
  static void key_gradient(const IndexerTask& t, const SparsePairs& p, const SparseParts& parts, const IndexerChoice& c,
                           cudaStream_t stream) {
    with_indexer_sizes<T>(c, RunKeyGradient{t, p, parts, stream});
  }
  static_assert(indexer_sizes_fit<T>());
  static constexpr IndexerLaunches launches{plan, topk, loss, query_gradient, key_gradient};
};

}  // namespace attnjourney
