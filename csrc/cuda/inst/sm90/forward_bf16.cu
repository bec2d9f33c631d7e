#include "forward.h"

void attnjourney::sm90_forward_bf16(ForwardTask task, bool ranged, const Device& device, cudaStream_t stream) {
  launch_sm90_forward<Bf16>(task, ranged, device, stream);
}
