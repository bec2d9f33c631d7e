// The launch function of linear attention for one dtype.
#pragma once
#include "cuda/kernels/linear/passes.cuh"
#include "cuda/kernels/linear/walk.cuh"
#include "cuda/launch.h"
#include "cuda/linear/launch_linear.h"

namespace attnjourney {

template <class Walk>
struct Sm80Linear {
  using T = typename Walk::T;
  cudaStream_t stream;
  void walk(const LinearTask& t) const {
    launch_kernel(linear_walk<Walk>, int64_t{t.pieces} * t.batch * t.kv_heads * t.slices, Walk::kThreads,
                  Walk::smem_bytes(t.depth), stream, t);
  }
  void scan(const LinearScan& t) const {
    launch_kernel(linear_scan<typename Walk::Real>, linear_scan_blocks(t), kLinearPassThreads, 0, stream, t);
  }
  void prepare(const LinearPrepare& t) const {
    launch_kernel(linear_prepare<T>, linear_prepare_blocks(t), kLinearPassThreads, 0, stream, t);
  }
};

template <class T>
void launch_sm80_linear(const LinearProblem& task, bool backward, cudaStream_t stream) {
  constexpr int kNumber = sizeof(typename LinearElement<T>::Real);
  using Large = LinearWalk<T, linear_chunk(kNumber, false, kLinearDepth)>;
  using Small = LinearWalk<T, linear_chunk(kNumber, true, kLinearDepth)>;
  static_assert(fits(Large::smem_bytes(kLinearDepth), false) && fits(Small::smem_bytes(kLinearDepth), true));
  static_assert(fits(Large::smem_bytes(kLinearSmallDepth), true));
  const auto run = [&]<class Walk>() {
    const LinearPlan plan(task);
    backward ? plan.backward(Sm80Linear<Walk>{stream}) : plan.forward(Sm80Linear<Walk>{stream});
  };
  task.chunk == Small::kRows ? run.template operator()<Small>() : run.template operator()<Large>();
}

}  // namespace attnjourney
