#include "wide_backward.h"

void attnjourney::sm80_wide_backward_fp16(const BackwardTask& task, cudaStream_t stream) {
  launch_sm80_wide_backward<Half>(task, sm80_option_gradients_fp16, stream);
}
