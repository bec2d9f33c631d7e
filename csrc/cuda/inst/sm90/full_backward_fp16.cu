#include "full_backward.h"

void attnjourney::sm90_full_backward_fp16(BackwardTask p, bool, const Device&, cudaStream_t stream) {
  launch_sm90_full_backward<Half>(p, stream, [&] { sm80_option_gradients_fp16(p, stream); });
}
