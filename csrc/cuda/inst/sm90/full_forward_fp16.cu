#include "full_forward.h"

void attnjourney::sm90_full_forward_fp16(ForwardTask p, const TileKinds& kinds, const Device& device,
                                         cudaStream_t stream) {
  launch_sm90_full_forward<Half>(p, kinds, device, stream);
}
