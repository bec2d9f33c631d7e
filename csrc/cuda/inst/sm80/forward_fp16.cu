#include "forward.h"

void attnjourney::sm80_forward_fp16(ForwardTask task, bool ranged, const Device&, cudaStream_t stream) {
  launch_sm80_forward<Half>(task, ranged, stream);
}
