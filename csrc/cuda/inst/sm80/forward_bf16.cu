#include "forward.h"

void attnjourney::sm80_forward_bf16(ForwardTask task, bool ranged, const Device&, cudaStream_t stream) {
  launch_sm80_forward<Bf16>(task, ranged, stream);
}
