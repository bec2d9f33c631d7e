// Sums over the rows of what pairs add to the gradients of keys and values, in the order of the rows.
#pragma once
#include "key_gradient.cuh"

namespace attnjourney {

constexpr int kSumThreads = 128, kSumKeys = 16;  // of a block

inline int64_t sparse_sum_blocks(const SparseTask& t) {
  return (t.params.kv_len + kSumKeys - 1) / kSumKeys * t.batch * t.kv_heads;
}

// grid: sparse_sum_blocks. A thread has columns of its own.
template <class Real>
__global__ void __launch_bounds__(kSumThreads)
    sparse_key_sums(const __grid_constant__ SparseTask task, const __grid_constant__ SparsePairs pairs) {
  const SparseLists& lists = pairs.lists;
  const int64_t keys = task.params.kv_len, head_dim = task.params.head_dim, v_head_dim = task.params.v_head_dim;
  const auto blocks = static_cast<int>((keys + kSumKeys - 1) / kSumKeys);
  const int head = blockIdx.x / blocks, width = static_cast<int>(head_dim + v_head_dim);  // head: of all batch items
  const int64_t list = lists.list(head / task.kv_heads, head % task.kv_heads);
  const int* const begins = lists.begins + list * (lists.size(task) + 1);
  const Real* const from = static_cast<const Real*>(pairs.pairs) + head * pairs.most * width;
  for (int i = 0; i < kSumKeys; i++) {
    const int64_t key = int64_t{blockIdx.x % blocks} * kSumKeys + i;
    if (key >= keys) return;
    const int first = begins[key * lists.words], last = begins[(key + 1) * lists.words];
    if (first == last && !pairs.begins) continue;
    for (int column = threadIdx.x; column < width; column += kSumThreads) {
      const bool of_key = column < head_dim;
      Real* const sums = static_cast<Real*>(of_key ? pairs.key : pairs.value);
      if (!sums) continue;
      Real sum = 0;
#pragma unroll 4
      for (int p = first; p < last; p++) sum += from[int64_t{p} * width + column];
      const int64_t at = head * keys + key;
      Real& to = sums[of_key ? at * head_dim + column : at * v_head_dim + column - head_dim];
      to = pairs.begins ? sum : to + sum;
    }
  }
}

// 16 bits: sums to the gradients themselves.
template <class T>
__global__ void __launch_bounds__(kListThreads) sparse_round(const float* from, T* to, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  if (i < count) store_one(to + i, from[i]);
}

}  // namespace attnjourney
