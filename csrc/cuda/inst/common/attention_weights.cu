#include "cuda/attention/weights_launch.h"
#include "cuda/launch.h"

namespace attnjourney {
namespace {

template <class T, class C>
void launch_weights(const WeightsTask<C>& task, cudaStream_t stream) {
  using Kernel = AttentionWeights<T, C>;
  static_assert(fits(Kernel::kSmemBytes, true));
  const int64_t heads = int64_t{task.batch} * task.n_heads;
  launch_kernel(attention_weights<Kernel>, weights_blocks(task.n_rows, task.kv_len, heads), Kernel::kThreads,
                Kernel::kSmemBytes, stream, task);
}

}  // namespace

void attention_weights_bf16(const WeightsTask<float>& task, cudaStream_t stream) { launch_weights<Bf16>(task, stream); }
void attention_weights_fp16(const WeightsTask<float>& task, cudaStream_t stream) { launch_weights<Half>(task, stream); }
void attention_weights_fp32(const WeightsTask<float>& task, cudaStream_t stream) {
  launch_weights<float>(task, stream);
}
void attention_weights_fp64(const WeightsTask<double>& task, cudaStream_t stream) {
  launch_weights<double>(task, stream);
}

}  // namespace attnjourney
