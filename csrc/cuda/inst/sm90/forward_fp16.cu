#include "forward.h"

void attnjourney::sm90_forward_fp16(ForwardTask task, bool ranged, const Device& device, cudaStream_t stream) {
  launch_sm90_forward<Half>(task, ranged, device, stream);
}
