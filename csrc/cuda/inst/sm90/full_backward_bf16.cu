#include "full_backward.h"

void attnjourney::sm90_full_backward_bf16(BackwardTask task, const TileKinds& kinds, const Device&,
                                          cudaStream_t stream) {
  launch_sm90_full_backward<Bf16>(task, kinds, stream, [&] { sm80_option_gradients_bf16(task, stream); });
}
