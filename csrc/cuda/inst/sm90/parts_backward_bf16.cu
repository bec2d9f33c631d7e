#include "parts_backward.h"

void attnjourney::sm90_parts_backward_bf16(BackwardTask task, bool ranged, const Device&, cudaStream_t stream) {
  launch_sm90_parts_backward<Bf16>(task, ranged, stream);
}
