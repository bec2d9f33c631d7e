#include "full_backward.h"

void attnjourney::sm80_full_backward_fp16(BackwardTask task, bool, const Device& device, cudaStream_t stream) {
  launch_sm80_full_backward<Half>(task, device, stream);
}

void attnjourney::sm80_option_gradients_fp16(const BackwardTask& task, cudaStream_t stream) {
  launch_option_gradients<Half>(task, stream);
}
