#include "cuda/kernels/fp32/fp16x2_backward.cuh"
#include "cuda/kernels/fp32/fp16x2_backward_passes.cuh"
#include "cuda/launch.h"

namespace attnjourney {
namespace {

template <class Kernel>
void launch_fp16x2_backward(const BackwardTask& task, const Fp16x2BackwardPlanes& w, const Device& device,
                            cudaStream_t stream) {
  constexpr int D = Kernel::kD;
  static_assert(fp16x2_rows(D) % Kernel::kRows == 0);
  const int64_t rows = int64_t{task.batch} * task.q_heads * task.rows;
  const int64_t planes = int64_t{task.q_heads} * w.query_tiles + int64_t{task.kv_heads} * w.key_tiles;
  const auto pass = [&](auto kernel, int64_t threads, auto... arguments) {
    launch_kernel(kernel, (threads + kFp32PassThreads - 1) / kFp32PassThreads, kFp32PassThreads, 0, stream, task,
                  arguments...);
  };
  pass(fp32_prepare<float>, 32 * rows, D, rows);
  launch_kernel(fp16x2_backward_planes<D>, 2 * task.batch * planes, Fp16x2Size<D>::kThreads, Fp16x2Size<D>::kSmemBytes,
                stream, task, w);
  launch_kernel(fp16x2_backward<Kernel>, int64_t{task.key_tiles} * task.kv_heads * task.batch, Kernel::kThreads,
                Kernel::kSmemBytes, stream, task, w);
  fp32_backward_fallback_float(task, w.needs_fallback, device, stream);
  if (task.grad_query) pass(fp16x2_query<Kernel>, rows * (D / 4), static_cast<const uint32_t*>(w.needs_fallback), rows);
}

}  // namespace

void fp16x2_backward_float(const BackwardTask& task, const Fp16x2BackwardPlanes& w, const Device& device,
                           cudaStream_t stream) {
  static_assert(Fp16x2BackwardOf<64>::kSmemBytes <= kSmallShared && Fp16x2BackwardSmall::kSmemBytes <= kSmallShared);
  const auto launch_it = backward_size(task.head_dim, task.v_head_dim) == 64
                             ? launch_fp16x2_backward<Fp16x2BackwardOf<64>>
                         : device.small() ? launch_fp16x2_backward<Fp16x2BackwardSmall>
                                          : launch_fp16x2_backward<Fp16x2BackwardOf<128>>;
  launch_it(task, w, device, stream);
}

}  // namespace attnjourney
