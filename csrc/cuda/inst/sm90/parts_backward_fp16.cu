#include "parts_backward.h"

void attnjourney::sm90_parts_backward_fp16(BackwardTask task, bool ranged, const Device&, cudaStream_t stream) {
  launch_sm90_parts_backward<Half>(task, ranged, stream);
}
