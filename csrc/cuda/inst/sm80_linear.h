// The launch function of linear attention for one dtype.
#pragma once
#include "../kernels/linear_passes.cuh"
#include "../kernels/linear_walk.cuh"
#include "linear.h"

namespace attnjourney {

template <class T>
struct Sm80Linear {
  using Walk = LinearWalk<T>;
  cudaStream_t stream;
  void walk(const LinearTask& t) const {
    launch(linear_walk<Walk>, int64_t{t.pieces} * t.batch * t.kv_heads * t.slices, Walk::kThreads,
           Walk::smem_bytes(t.depth), stream, t);
  }
  void scan(const LinearScan& t) const {
    launch(linear_scan<typename Walk::C>, linear_scan_blocks(t), kLinearPassThreads, 0, stream, t);
  }
  void prepare(const LinearPrepare& t) const {
    launch(linear_prepare<T>, linear_prepare_blocks(t), kLinearPassThreads, 0, stream, t);
  }
};

template <class T>
void launch_sm80_linear(const LinearProblem& p, bool backward, cudaStream_t stream) {
  const LinearPlan plan(p);
  if (backward)
    plan.backward(Sm80Linear<T>{stream});
  else
    plan.forward(Sm80Linear<T>{stream});
}

}  // namespace attnjourney
