// The kernels of the indexer's calls, one after the other, as plan.cuh has those of attention.
#pragma once
#include "indexer_gradients.cuh"
#include "plan.cuh"

namespace attnjourney {

// How the keys of a call are split over blocks, and in which steps of rows its lists take `bytes` at most, or one
// block.
struct TopkPlan {
  int rows, parts, part_keys, capacity;
  int64_t lists;  // at a time
  // blocks: what the device runs at a time
  TopkPlan(const IndexerParams& p, int batch, int rows_of_block, int tile_keys, int number_size, int blocks,
           int64_t bytes) {
    const int64_t keys = p.kv_len < 1 ? 1 : p.kv_len, topk = p.topk < keys ? p.topk : keys;
    const int64_t tiles = int64_t{batch} * ((p.q_len + rows_of_block - 1) / rows_of_block);
    const int64_t least = 2 * topk > 1024 ? 2 * topk : 1024;  // keys of a part: most of the work is scores, not lists
    const int64_t want = tiles > 0 ? (blocks + tiles - 1) / tiles : 1, most = (keys + least - 1) / least;
    const int64_t split = want < most ? want : most;
    part_keys = static_cast<int>(((keys + split - 1) / split + tile_keys - 1) / tile_keys * tile_keys);
    parts = static_cast<int>((keys + part_keys - 1) / part_keys);
    const int64_t chosen = topk < part_keys ? topk : part_keys;
    capacity = static_cast<int>(chosen + (chosen > 512 ? chosen : 512));
    const int64_t row = int64_t{batch} * parts * capacity * (number_size + 4), fit = row > 0 ? bytes / row : p.q_len;
    rows = static_cast<int>(fit < rows_of_block ? rows_of_block : fit / rows_of_block * rows_of_block);
    if (rows > p.q_len) rows = static_cast<int>(p.q_len);
    lists = int64_t{batch} * rows * parts;
  }
};

// Launch: parts, select, each of (task).
template <class Launch>
void run_topk(TopkTask task, const TopkPlan& plan, Launch&& launch) {
  task.parts = plan.parts, task.part_keys = plan.part_keys, task.capacity = plan.capacity;
  for (int64_t first = 0; first < task.params.q_len; first += plan.rows) {
    task.first_row = static_cast<int>(first);
    task.rows = static_cast<int>(task.params.q_len - first < plan.rows ? task.params.q_len - first : plan.rows);
    launch.parts(task);
    launch.select(task);
  }
}

// What run_key_gradients launches for the indexer: key_gradient is of its own task.
template <class Launch>
struct IndexerKeys {
  const IndexerTask& task;
  const Launch& launch;
  void clear(uint32_t* p, int64_t count) const { launch.clear(p, count); }
  void mark(const SparseTask& t, const SparsePairs& p) const { launch.mark(t, p); }
  void count(const SparseTask& t, const SparsePairs& p) const { launch.count(t, p); }
  void places(const SparseTask& t, const SparsePairs& p) const { launch.places(t, p); }
  void key_gradient(const SparseTask&, const SparsePairs& p) const { launch.key_gradient(task, p); }
  void key_sums(const SparseTask& t, const SparsePairs& p) const { launch.key_sums(t, p); }
};

}  // namespace attnjourney
