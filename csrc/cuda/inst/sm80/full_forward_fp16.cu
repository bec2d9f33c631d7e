#include "full_forward.h"

void attnjourney::sm80_options_forward_fp16(ForwardTask p, bool, const Device&, cudaStream_t stream) {
  launch_sm80_options_forward<Half>(p, stream);
}
