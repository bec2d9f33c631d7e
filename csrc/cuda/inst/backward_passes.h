// A backward kernel between its passes.
#pragma once
#include "cuda/kernels/common/backward_passes.cuh"
#include "cuda/launch.h"

namespace attnjourney {

// main(): launches the kernel itself
template <class Kernel, class Main>
void launch_backward(const BackwardTask& task, cudaStream_t stream, Main&& main) {
  const int64_t pairs = int64_t{task.cu_q ? 1 : task.batch} * task.q_heads,
                kv_pairs = int64_t{task.batch} * task.kv_heads;
  const auto pass = [&](auto kernel, int64_t rows, int64_t count, int columns = Kernel::kD) {
    launch_kernel(kernel, pass_blocks(rows, columns, count), kPassThreads, 0, stream, task);
  };
  pass(backward_prepare<typename Kernel::T, Kernel::kD>, task.rows, pairs, 8 * kPrepareThreads<Kernel::kD>);
  main();
  if (task.grad_query && !task.query_blocks) pass(backward_query<Kernel>, task.rows, pairs);
  if constexpr (requires { &Kernel::load_key; })
    if (task.key_value_sum) pass(backward_key_value<Kernel>, int64_t{task.key_tiles} * Kernel::kKeys, 2 * kv_pairs);
}

}  // namespace attnjourney
