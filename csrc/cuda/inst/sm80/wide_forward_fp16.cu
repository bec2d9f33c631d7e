#include "wide_forward.h"

void attnjourney::sm80_wide_forward_fp16(ForwardTask task, cudaStream_t stream) {
  launch_sm80_wide_forward<Half>(task, stream);
}
