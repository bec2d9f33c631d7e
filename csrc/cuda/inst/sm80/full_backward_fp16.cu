#include "full_backward.h"

void attnjourney::sm80_full_backward_fp16(BackwardTask p, bool, const Device& device, cudaStream_t stream) {
  launch_sm80_full_backward<Half>(p, device, stream);
}

void attnjourney::sm80_option_gradients_fp16(const BackwardTask& p, cudaStream_t stream) {
  launch_option_gradients<Half>(p, stream);
}
