#include "full_forward.h"

void attnjourney::sm90_full_forward_bf16(ForwardTask p, const TileKinds& kinds, const Device& device,
                                         cudaStream_t stream) {
  launch_sm90_full_forward<Bf16>(p, kinds, device, stream);
}
