#include "full_forward.h"

void attnjourney::sm80_full_forward_bf16(ForwardTask task, bool, const Device&, cudaStream_t stream) {
  launch_sm80_full_forward<Bf16>(task, stream);
}
