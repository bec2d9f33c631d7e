#include "sm80_options_backward.h"

void attnjourney::sm80_options_backward_fp16(BackwardTask p, bool, const Device& device, cudaStream_t stream) {
  launch_sm80_options_backward<Half>(p, device, stream);
}
