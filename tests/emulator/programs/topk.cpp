// Runs the indexer's choice of keys by the kernel -DTOPK. stdin: query, key, weights [batch, heads, q_len], key_lengths
// as asked for. stdout: indices, scores. blocks: that the device runs at a time; workspace: bytes of lists.
#include "emulator/machine/driver.h"
//
#include "kernels/topk.h"

struct Launch {
  emulator::Options options;
  void parts(const TopkTask& t) const {
    const int64_t blocks = int64_t{t.batch} * ((t.rows + Topk::kRows - 1) / Topk::kRows) * t.parts;
    const auto bytes =
        static_cast<size_t>(Topk::smem_bytes(static_cast<int>(t.params.heads), static_cast<int>(t.params.head_dim)));
    if (blocks)
      emulator::launch(indexer_parts<Topk>, dim3(static_cast<unsigned>(blocks)), dim3(Topk::kThreads), bytes, options,
                       t);
  }
  void select(const TopkTask& t) const {
    const int64_t blocks = int64_t{t.batch} * t.rows;
    if (blocks)
      emulator::launch(indexer_select<C>, dim3(static_cast<unsigned>(blocks)), dim3(kSelectThreads),
                       size_t{4} * (kSelectThreads / 32), options, t);
  }
};

int main(int argc, char** argv) {
  return driver::run(argc, argv, [](const driver::Arguments& a) {
    const bool rows_first = a["rows_first"];
    const driver::Shape q{a["batch"], a["heads"], a["q_len"], a["head_dim"], rows_first};
    const driver::Shape k{q.batch, 1, a["kv_len"], q.dim, rows_first};
    emulator::Buffer<T> query(driver::read<T>(q.size()), "query"), key(driver::read<T>(k.size()), "key");
    emulator::Buffer<C> weights(driver::read<C>(static_cast<size_t>(q.batch) * q.heads * q.length), "weights");
    emulator::Buffer<int> lengths(driver::read<int>(a["lengths"] ? static_cast<size_t>(q.batch) : 0), "key_lengths");
    TopkTask t{};
    t.params.heads = q.heads, t.params.q_len = q.length, t.params.kv_len = k.length, t.params.head_dim = q.dim;
    t.params.topk = a["topk"], t.params.scale = a["scale"] / 1000.0;
    t.params.causal = a["causal"] != 0, t.params.bottom_right = a["bottom_right"] != 0;
    t.query = query.data, t.key = key.data, t.weights = weights.data;
    t.q = q.strides<Strides>(), t.k = k.strides<Strides>(), t.batch = q.batch;
    t.key_lengths = a["lengths"] ? lengths.data : nullptr;
    const TopkPlan plan(t.params, q.batch, Topk::kRows, Topk::kKeys, sizeof(C), a["blocks"], a["workspace"]);
    const auto lists = static_cast<size_t>(plan.lists);
    emulator::Buffer<C> list_scores(lists * plan.capacity, "list_scores");
    emulator::Buffer<int> list_indices(lists * plan.capacity, "list_indices"), list_counts(lists, "list_counts");
    const size_t count = static_cast<size_t>(q.batch) * q.length * a["topk"];
    emulator::Buffer<int> indices(count, "indices");
    emulator::Buffer<C> scores(count, "scores");
    t.list_scores = list_scores.data, t.list_indices = list_indices.data, t.list_counts = list_counts.data;
    t.indices = indices.data, t.scores = scores.data;
    run_topk(t, plan, Launch{a.options()});
    driver::write(indices);
    driver::write(scores);
  });
}
