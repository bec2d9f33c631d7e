#include "backward.h"

void attnjourney::sm90_backward_fp16(BackwardTask p, bool ranged, const Device&, cudaStream_t stream) {
  launch_sm90_backward<Half>(p, ranged, stream);
}
