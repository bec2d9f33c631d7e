#include "full_backward.h"

void attnjourney::sm90_full_backward_bf16(BackwardTask task, bool, const Device&, cudaStream_t stream) {
  launch_sm90_full_backward<Bf16>(task, stream, [&] { sm80_option_gradients_bf16(task, stream); });
}
