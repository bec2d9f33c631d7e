// The launch functions of gated linear attention for one dtype.
#pragma once
#include "cuda/kernels/gated/gradients.cuh"
#include "cuda/kernels/gated/pairs.cuh"
#include "cuda/kernels/gated/plan.cuh"
#include "cuda/kernels/gated/rows.cuh"
#include "cuda/kernels/gated/step.cuh"
#include "cuda/kernels/gated/walk.cuh"
#include "cuda/launch.h"
#include "cuda/linear/launch_gated.h"

namespace attnjourney {

template <class T>
struct GatedLaunch {
  using Real = Compute<T>;
  static constexpr int kRows = gated_rows(sizeof(Real));
  cudaStream_t stream;

  template <class Kernel, class... More>
  void run(Kernel kernel, int64_t blocks, int threads, int bytes, const GatedTask& t, More... more) const {
    launch_kernel(kernel, blocks, threads, bytes, stream, t, more...);
  }
  static int64_t chunks(const GatedTask& t) { return int64_t{t.slots} * t.v_heads; }
  static int64_t slices(const GatedTask& t, int cols) {
    return int64_t{t.sequences} * t.v_heads * ((t.v_head_dim + cols - 1) / cols);
  }
  template <class Narrow, class Wide>
  void walk(const GatedTask& t) const {
    static_assert(fits(Narrow::smem_bytes(128), true) && fits(Wide::smem_bytes(kGatedMost), true));
    if (gated_wide(t.head_dim))
      run(gated_walk<Wide>, slices(t, Wide::kCols), kGatedThreads, Wide::smem_bytes(t.head_dim), t);
    else
      run(gated_walk<Narrow>, slices(t, Narrow::kCols), kGatedThreads, Narrow::smem_bytes(t.head_dim), t);
  }
  static constexpr int kNarrow = gated_cols(sizeof(Real), false), kWide = gated_cols(sizeof(Real), true);

  void norms(const GatedTask& t) const {
    run(gated_norms<T>, gated_pass_blocks(t, t.q_heads + t.kv_heads), kGatedPassThreads, 0, t);
  }
  void decays(const GatedTask& t) const {
    run(gated_decays<Real>, chunks(t), kGatedThreads, kRows * int(sizeof(Real)), t);
  }
  void pairs(const GatedTask& t) const {
    using Kernel = GatedPairs<T, false>;
    static_assert(fits(Kernel::smem_bytes(), true));
    run(gated_pairs<T>, chunks(t) * t.products(), kGatedThreads, Kernel::smem_bytes(), t);
  }
  void forward(const GatedTask& t) const { walk<GatedForward<T, kNarrow>, GatedForward<T, kWide>>(t); }
  void backward(const GatedTask& t) const { walk<GatedBackward<T, kNarrow>, GatedBackward<T, kWide>>(t); }
  void pair_gradients(const GatedTask& t) const {
    using Kernel = GatedPairs<T, true>;
    run(gated_pair_gradients<T>, chunks(t) * t.products(), kGatedThreads, Kernel::smem_bytes(), t);
  }
  void gradients(const GatedTask& t) const {
    using Kernel = GatedChunkGradients<T>;
    static_assert(fits(Kernel::smem_bytes(true), true));
    run(gated_gradients<T>, chunks(t) * gated_slices(t.head_dim), kGatedThreads,
        Kernel::smem_bytes(t.kind == Gate::channel), t);
  }
  void finish(const GatedTask& t, bool of_key) const {
    run(gated_finish<T>, gated_pass_blocks(t, of_key ? t.kv_heads : t.q_heads), kGatedPassThreads, 0, t, of_key);
  }
  void sum_slices(const GatedTask& t, const void* sums, void* to) const {
    const int64_t count = int64_t{t.batch} * t.v_heads * t.len;
    run(gated_sum_slices<Real>, (count + kGatedPassThreads - 1) / kGatedPassThreads, kGatedPassThreads, 0, t, sums, to);
  }
  template <int Depth>
  void step_of(const GatedTask& t) const {
    run(gated_step<T, Depth>, slices(t, kGatedStepCols), kGatedThreads, GatedStep<T, Depth>::smem_bytes(), t);
  }
  void step(const GatedTask& t) const { gated_wide(t.head_dim) ? step_of<64>(t) : step_of<32>(t); }
};

template <class T>
void launch_gated(const GatedPlan& plan, bool backward, cudaStream_t stream) {
  const GatedLaunch<T> launch{stream};
  backward ? plan.backward(launch) : plan.forward(launch);
}

}  // namespace attnjourney
