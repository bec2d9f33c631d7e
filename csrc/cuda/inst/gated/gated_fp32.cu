#include "gated.h"

void attnjourney::sm80_gated_fp32(const GatedPlan& plan, bool backward, cudaStream_t stream) {
  launch_gated<float>(plan, backward, stream);
}
