#include "full_forward.h"

void attnjourney::sm90_full_forward_bf16(ForwardTask task, const TileKinds& kinds, const Device& device,
                                         cudaStream_t stream) {
  launch_sm90_full_forward<Bf16>(task, kinds, device, stream);
}
