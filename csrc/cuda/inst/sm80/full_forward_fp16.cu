#include "full_forward.h"

void attnjourney::sm80_full_forward_fp16(ForwardTask task, bool, const Device&, cudaStream_t stream) {
  launch_sm80_full_forward<Half>(task, stream);
}
