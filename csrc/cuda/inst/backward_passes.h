// A backward kernel between its passes.
#pragma once
#include "cuda/kernels/common/backward_passes.cuh"
#include "cuda/launch.h"

namespace attnjourney {

// main(): launches the kernel itself
template <class Kernel, class Main>
void launch_backward(const BackwardTask& p, cudaStream_t stream, Main&& main) {
  const int64_t pairs = int64_t{p.cu_q ? 1 : p.batch} * p.q_heads, kv_pairs = int64_t{p.batch} * p.kv_heads;
  const auto pass = [&](auto kernel, int64_t rows, int64_t count) {
    launch_kernel(kernel, pass_blocks(rows, Kernel::kD, count), kPassThreads, 0, stream, p);
  };
  pass(backward_prepare<typename Kernel::T, Kernel::kD>, p.rows, pairs);
  main();
  if (p.grad_query && !p.query_blocks) pass(backward_query<Kernel>, p.rows, pairs);
  if constexpr (requires { &Kernel::load_key; })
    if (p.key_value_sum) pass(backward_key_value<Kernel>, int64_t{p.key_tiles} * Kernel::kKeys, 2 * kv_pairs);
}

}  // namespace attnjourney
