// Runs the indexer's loss and its gradients by the kernels of -DINDEXER and -DTARGETS. stdin: index_query, index_key,
// weights [batch, heads, q_len], query, key, indices, grad_loss. stdout: loss, grad_scores; gradients of index_query,
// index_key, weights.
#include "emulator/machine/driver.h"
//
#include "kernels/indexer.h"
//
#include "sparse_launch.h"

template <class X>
emulator::Buffer<X> given(int64_t count, const char* name) {
  return {driver::read<X>(static_cast<size_t>(count)), name};
}

struct Launch : SparseLaunch {
  void key_gradient(const IndexerTask& t, const SparsePairs& p) const {
    const int64_t tiles = (t.index.params.index_count + KeyGradient::kKeys - 1) / KeyGradient::kKeys;
    run(indexer_key_gradient<KeyGradient>, tiles * p.lists.rows * t.index.batch, KeyGradient::kThreads,
        KeyGradient::smem_bytes(dim(t.index)), t, p);
  }
  template <class Kernel>
  void columns(const IndexerTask& t, const SparseTask& of) const {
    const int64_t tiles = (of.params.index_count + Kernel::kKeys - 1) / Kernel::kKeys;
    run(indexer_columns<Kernel>, tiles * of.batch * of.blocks, Kernel::kThreads, Kernel::smem_bytes(dim(of)), t);
  }
  static int dim(const SparseTask& t) { return static_cast<int>(t.params.head_dim); }
};

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const bool rows_first = a["rows_first"];
    const driver::Shape iq{a["batch"], a["heads"], a["q_len"], a["head_dim"], rows_first};
    const driver::Shape ik{iq.batch, 1, a["kv_len"], iq.dim, rows_first};
    const driver::Shape q{iq.batch, a["q_heads"], iq.length, a["target_dim"], rows_first};
    const driver::Shape k{iq.batch, a["kv_heads"], ik.length, q.dim, rows_first};
    const int count = a["index_count"];
    const int64_t rows = int64_t{iq.batch} * iq.length, of_heads = rows * iq.heads, named = rows * count;
    const auto index_query = given<T>(static_cast<int64_t>(iq.size()), "index_query");
    const auto index_key = given<T>(static_cast<int64_t>(ik.size()), "index_key");
    const auto weights = given<C>(of_heads, "weights");
    const auto query = given<T>(static_cast<int64_t>(q.size()), "query");
    const auto key = given<T>(static_cast<int64_t>(k.size()), "key");
    const auto indices = given<int>(named, "indices");
    const auto grad_loss = given<C>(rows, "grad_loss");
    const auto fresh = [](int64_t size, const char* name) {
      return emulator::Buffer<C>(static_cast<size_t>(size), name);
    };
    const auto lse = fresh(rows * q.heads, "lse"), stats = fresh(2 * rows * q.heads, "stats");
    const auto target = fresh(named, "target"), loss = fresh(rows, "loss"), grad_scores = fresh(named, "grad_scores");
    const auto grad_weights = fresh(of_heads, "grad_weights"),
               grad_key = fresh(static_cast<int64_t>(ik.size()), "sums");
    emulator::Buffer<T> grad_query(iq.size(), "grad_query");

    constexpr double kLog2E = 1.4426950408889634;
    const auto task_of = [&](const driver::Shape& rows_of, const driver::Shape& keys_of, const T* q_, const T* k_,
                             double scale) {
      SparseTask t{};
      SparseParams& p = t.params;
      p.q_len = rows_of.length, p.kv_len = keys_of.length, p.head_dim = rows_of.dim;
      p.group = t.group = rows_of.heads / keys_of.heads, p.index_count = count, p.scale = scale;
      t.query = q_, t.key = k_, t.q = rows_of.strides<Strides>(), t.k = keys_of.strides<Strides>();
      t.indices = indices.data, t.names = {int64_t{rows_of.length} * count, 0, count};
      t.batch = rows_of.batch, t.kv_heads = keys_of.heads, t.blocks = rows_of.length, t.score_scale = scale * kLog2E;
      return t;
    };
    IndexerTask t{};
    t.index = task_of(iq, ik, index_query.data, index_key.data, a["index_scale"] / 1000.0);
    t.attention = task_of(q, k, query.data, key.data, a["scale"] / 1000.0);
    t.attention.lse = lse.data, t.attention.stats = stats.data, t.index.grad_query = grad_query.data;
    t.weights = weights.data, t.target = target.data, t.loss = loss.data, t.grad_scores = grad_scores.data;
    t.grad_loss = grad_loss.data, t.grad_weights = grad_weights.data;
    const Launch launch{{a.options()}};
    launch.run(sparse_forward<Stats>, rows * k.heads * Stats::tiles(t.attention.group), Stats::kThreads,
               Stats::smem_bytes(q.dim, 0), t.attention);
    launch.columns<TargetColumns>(t, t.attention);
    launch.columns<ScoreColumns>(t, t.index);
    launch.run(indexer_loss<C>, rows, kLossThreads, kLossThreads / 32 * 8, t);
    driver::write(loss);
    driver::write(grad_scores);

    launch.run(indexer_query_gradient<QueryGradient>, rows * QueryGradient::tiles(iq.heads), QueryGradient::kThreads,
               QueryGradient::smem_bytes(iq.dim), t);
    driver::write(grad_query);
    const SparseParts parts(t.index, 1, sizeof(C), a["workspace"]);
    const auto numbers = [](int64_t size, const char* name) {
      return emulator::Buffer<uint32_t>(static_cast<size_t>(size), name);
    };
    const auto masks = numbers(parts.masks, "masks"), repeats = numbers(parts.repeats, "repeats");
    const auto begins = numbers(parts.begins, "begins"), totals = numbers(parts.totals, "totals");
    const auto pairs_of = fresh(parts.pairs, "pairs");
    SparsePairs pairs{};
    pairs.lists.index_heads = 1, pairs.lists.masks = masks.data, pairs.lists.repeats = repeats.data;
    pairs.lists.begins = reinterpret_cast<int*>(begins.data), pairs.lists.totals = reinterpret_cast<int*>(totals.data);
    pairs.pairs = pairs_of.data, pairs.key = grad_key.data;
    run_key_gradients(t.index, pairs, parts, IndexerKeys<Launch>{t, launch});
    if constexpr (sizeof(T) == 2) {
      const auto size = static_cast<int64_t>(grad_key.size);
      emulator::Buffer<T> rounded(grad_key.size, "rounded");
      launch.run(sparse_round<T>, (size + kListThreads - 1) / kListThreads, kListThreads, 0,
                 reinterpret_cast<const float*>(grad_key.data), rounded.data, size);
      driver::write(rounded);
    } else {
      driver::write(grad_key);
    }
    driver::write(grad_weights);
  });
}
