// The end of a block of the Hopper backward where sequences are short: the last block of a query head turns its sums
// into dQ while they lie in the second-level cache. A pass of its own over all heads would read them from memory: at
// 1024 queries of 128 columns 8 % of the whole. Beyond kShortRows (cuda/sizes.h), where the last blocks would be at it
// for long, that pass does it.
#pragma once
#include "backward_shape.cuh"
#include "cuda/kernels/common/backward_passes.cuh"

namespace attnjourney {

// The 256 threads of the consumers, whose additions to the sums have been issued. vote: a word of shared memory that
// is no longer used; barrier 1 is free.
template <class Shape>
__device__ __forceinline__ void finish_queries(const BackwardTask& task, const BackwardTile& where, uint32_t* vote) {
  const int tid = static_cast<int>(threadIdx.x) - 128;
  for (int h = 0; h < where.heads; h++) {
    const int head = where.first_head + h, pair = where.batch * task.q_heads + head;
    ptx::bar_sync(1, 256);
    if (tid == 0) {
      ptx::thread_fence();  // @counted_after: this block's additions before the count, the others' after it
      *vote = ptx::atomic_add(task.query_blocks + pair, 1);
      ptx::thread_fence();
    }
    ptx::bar_sync(1, 256);
    if (*vote != static_cast<uint32_t>(task.key_tiles) - 1) continue;
    const float* sums = task.query_sum + int64_t(pair) * task.rows * Shape::kD;
#pragma unroll 4
    for (int i = tid; i < (task.q_len + 7) / 8 * Shape::kD; i += 256) {
      const PassPiece<Shape::kD> at(i);
      if (at.row >= task.q_len || at.chunk * 8 >= task.head_dim) continue;
      float x[8];
      Shape::load_query(x, sums + at.row / Shape::kRows * (Shape::kRows * Shape::kD), at.row % Shape::kRows, at.chunk);
      write_scaled<typename Shape::T>(task.grad_query, task.grad_query_strides, where.batch, head, at.row, at.chunk, x,
                                      task.scale);
    }
  }
}

}  // namespace attnjourney
