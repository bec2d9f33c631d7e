#include "gated.h"

void attnjourney::sm80_gated_fp16(const GatedPlan& plan, bool backward, cudaStream_t stream) {
  launch_gated<Half>(plan, backward, stream);
}
