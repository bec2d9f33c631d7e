#include "cuda/kernels/fp32/fp16x2_backward.cuh"
#include "cuda/kernels/fp32/fp16x2_backward_passes.cuh"
#include "cuda/launch.h"

namespace attnjourney {
namespace {

template <class Kernel>
void launch_split_backward(const BackwardTask& p, const SplitBackwardPlanes& w, const Device& device,
                           cudaStream_t stream) {
  constexpr int D = Kernel::kD;
  static_assert(split_rows(D) % Kernel::kRows == 0);
  const int64_t rows = int64_t{p.batch} * p.q_heads * p.rows;
  const int64_t planes = int64_t{p.q_heads} * w.query_tiles + int64_t{p.kv_heads} * w.key_tiles;
  const auto pass = [&](auto kernel, int64_t threads, auto... arguments) {
    launch(kernel, (threads + kWidePassThreads - 1) / kWidePassThreads, kWidePassThreads, 0, stream, p, arguments...);
  };
  pass(wide_prepare<float>, 32 * rows, D, rows);
  launch(split_backward_planes<D>, 2 * p.batch * planes, SplitSize<D>::kThreads, SplitSize<D>::kSmemBytes, stream, p,
         w);
  launch(split_backward<Kernel>, int64_t{p.key_tiles} * p.kv_heads * p.batch, Kernel::kThreads, Kernel::kSmemBytes,
         stream, p, w);
  sm80_wide_backward_rest_fp32(p, w.rare, device, stream);
  if (p.grad_query) pass(split_query<Kernel>, rows * (D / 4), static_cast<const uint32_t*>(w.rare), rows);
}

}  // namespace

void sm80_split_backward_fp32(const BackwardTask& p, const SplitBackwardPlanes& w, const Device& device,
                              cudaStream_t stream) {
  static_assert(SplitBackwardOf<64>::kSmemBytes <= kSmallShared && SplitBackwardSmall::kSmemBytes <= kSmallShared);
  const auto launch_it = backward_size(p.head_dim, p.v_head_dim) == 64 ? launch_split_backward<SplitBackwardOf<64>>
                         : device.small()                              ? launch_split_backward<SplitBackwardSmall>
                                                                       : launch_split_backward<SplitBackwardOf<128>>;
  launch_it(p, w, device, stream);
}

}  // namespace attnjourney
