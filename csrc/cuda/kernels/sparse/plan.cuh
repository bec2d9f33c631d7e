// The kernels of a call of token-sparse attention, one after the other. What launches them is the caller's: CUDA, or
// the emulator.
#pragma once
#include "key_sums.cuh"

namespace attnjourney {

// The workspace of a backward that wants gradients of keys or values: how many rows of indices are a part, so that what
// their pairs add takes `bytes` at most, or one row.
struct SparseParts {
  int rows = 0, words = 0;
  int64_t most = 0;                                                   // pairs of a head of a part
  int64_t lists = 0;                                                  // that there are: [batch][index_heads]
  int64_t masks = 0, repeats = 0, begins = 0, totals = 0, pairs = 0;  // numbers of each
  SparseParts(const SparseTask& t, int index_heads, int number_size, int64_t bytes) {
    const SparseParams& p = t.params;
    const int64_t row = p.index_count * (p.head_dim + p.v_head_dim) * number_size * t.batch * t.kv_heads;
    const int64_t fit = row > 0 ? bytes / row : t.blocks;
    rows = static_cast<int>(fit < 1 ? 1 : fit > 1024 ? 1024 : fit);
    if (rows > t.blocks) rows = t.blocks;
    words = (rows + 31) / 32;
    lists = int64_t{t.batch} * index_heads, most = rows * p.index_count;
    masks = lists * p.kv_len * words, repeats = lists * words, begins = lists * (p.kv_len * words + 1);
    totals = lists * ((p.kv_len * words + kListWords - 1) / kListWords);
    pairs = most * (p.head_dim + p.v_head_dim) * t.batch * t.kv_heads;
  }
};

// Launch: clear(pointer, numbers of 32 bits), mark, count, places, key_gradient, key_sums, each of (task, pairs).
template <class Launch>
void run_key_gradients(const SparseTask& task, SparsePairs pairs, const SparseParts& parts, Launch&& launch) {
  for (int first = 0; first == 0 || first < task.blocks; first += parts.rows) {
    SparseLists& lists = pairs.lists;
    lists.first = first, lists.rows = parts.rows < task.blocks - first ? parts.rows : task.blocks - first;
    lists.words = parts.words, pairs.most = parts.most, pairs.begins = first == 0;
    launch.clear(lists.masks, parts.masks);
    launch.clear(lists.repeats, parts.repeats);
    launch.mark(task, pairs);
    launch.count(task, pairs);
    launch.places(task, pairs);
    launch.key_gradient(task, pairs);
    launch.key_sums(task, pairs);
    if (parts.rows == 0) break;
  }
}

}  // namespace attnjourney
