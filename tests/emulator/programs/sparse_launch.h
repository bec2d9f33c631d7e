// The launches that sparse.cpp and indexer.cpp share. Their kernels come before it: C is the type of the arithmetic.
#pragma once
#include "emulator/machine/driver.h"

struct SparseLaunch {
  emulator::Options options;
  template <class... Parameters, class... Args>
  void run(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t bytes, const Args&... args) const {
    if (blocks > 0)
      emulator::launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                       static_cast<size_t>(bytes), options, args...);
  }
  static void clear(uint32_t* p, int64_t count) {
    std::fill(p, p + count, 0u);
    emulator::mark_initialised(p, static_cast<size_t>(4 * count));
  }
  void mark(const SparseTask& t, const SparsePairs& p) const {
    run(sparse_mark<SparseLists>, sparse_mark_blocks(t, p.lists), kListThreads, 0, t, p.lists);
  }
  void count(const SparseTask& t, const SparsePairs& p) const { by_count(sparse_count<SparseLists>, t, p.lists); }
  void places(const SparseTask& t, const SparsePairs& p) const { by_count(sparse_places<SparseLists>, t, p.lists); }
  void key_sums(const SparseTask& t, const SparsePairs& p) const {
    run(sparse_key_sums<C>, sparse_sum_blocks(t), kSumThreads, 0, t, p);
  }

 private:
  void by_count(void (*kernel)(SparseTask, SparseLists), const SparseTask& t, const SparseLists& l) const {
    run(kernel, sparse_count_blocks(t, l) * t.batch * l.index_heads, kListThreads, kListThreads / 32 * 4, t, l);
  }
};
