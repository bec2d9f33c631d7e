#include "full_backward.h"

void attnjourney::sm80_full_backward_bf16(BackwardTask task, bool, const Device& device, cudaStream_t stream) {
  launch_sm80_full_backward<Bf16>(task, device, stream);
}

void attnjourney::sm80_option_gradients_bf16(const BackwardTask& task, cudaStream_t stream) {
  launch_option_gradients<Bf16>(task, stream);
}
