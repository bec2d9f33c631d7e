#include "wide_backward.h"

void attnjourney::sm80_wide_backward_bf16(const BackwardTask& task, cudaStream_t stream) {
  launch_sm80_wide_backward<Bf16>(task, sm80_option_gradients_bf16, stream);
}
