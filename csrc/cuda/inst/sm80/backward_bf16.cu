#include "backward.h"

void attnjourney::sm80_backward_bf16(BackwardTask task, bool ranged, const Device&, cudaStream_t stream) {
  launch_sm80_backward<Bf16>(task, ranged, stream);
}
