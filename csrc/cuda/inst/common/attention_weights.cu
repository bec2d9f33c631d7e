#include "cuda/attention/weights_launch.h"
#include "cuda/launch.h"

namespace attnjourney {
namespace {

template <class T, class C>
void launch_weights(const WeightsTask<C>& p, cudaStream_t stream) {
  using Kernel = AttentionWeights<T, C>;
  static_assert(fits(Kernel::kSmemBytes, true));
  const int64_t heads = int64_t{p.batch} * p.n_heads;
  launch_kernel(attention_weights<Kernel>, weights_blocks(p.n_rows, p.kv_len, heads), Kernel::kThreads,
                Kernel::kSmemBytes, stream, p);
}

}  // namespace

void attention_weights_bf16(const WeightsTask<float>& p, cudaStream_t stream) { launch_weights<Bf16>(p, stream); }
void attention_weights_fp16(const WeightsTask<float>& p, cudaStream_t stream) { launch_weights<Half>(p, stream); }
void attention_weights_fp32(const WeightsTask<float>& p, cudaStream_t stream) { launch_weights<float>(p, stream); }
void attention_weights_fp64(const WeightsTask<double>& p, cudaStream_t stream) { launch_weights<double>(p, stream); }

}  // namespace attnjourney
