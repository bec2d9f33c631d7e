// Launches of the kernels that add up the gradients of keys, of attention and of its indexer.
#pragma once
#include "cuda/kernels/sparse/plan.cuh"
#include "cuda/launch.h"

namespace attnjourney {

template <class Real>
struct Sm80SparseLists {
  cudaStream_t stream;
  void clear(uint32_t* p, int64_t count) const {
    if (count) cuda_check(cudaMemsetAsync(p, 0, static_cast<size_t>(4 * count), stream), "cudaMemsetAsync");
  }
  void mark(const SparseTask& t, const SparsePairs& p) const {
    launch_kernel(sparse_mark<SparseLists>, sparse_mark_blocks(t, p.lists), kListThreads, 0, stream, t, p.lists);
  }
  void count(const SparseTask& t, const SparsePairs& p) const { walk(sparse_count<SparseLists>, t, p.lists); }
  void places(const SparseTask& t, const SparsePairs& p) const { walk(sparse_places<SparseLists>, t, p.lists); }
  void key_sums(const SparseTask& t, const SparsePairs& p) const {
    launch_kernel(sparse_key_sums<Real>, sparse_sum_blocks(t), kSumThreads, 0, stream, t, p);
  }

 private:
  void walk(void (*kernel)(SparseTask, SparseLists), const SparseTask& t, const SparseLists& l) const {
    launch_kernel(kernel, sparse_count_blocks(t, l) * t.batch * l.index_heads, kListThreads, kListThreads / 32 * 4,
                  stream, t, l);
  }
};

}  // namespace attnjourney
