#include "backward.h"

void attnjourney::sm80_backward_fp16(BackwardTask task, bool ranged, const Device&, cudaStream_t stream) {
  launch_sm80_backward<Half>(task, ranged, stream);
}
