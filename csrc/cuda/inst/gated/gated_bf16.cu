#include "gated.h"

void attnjourney::sm80_gated_bf16(const GatedPlan& plan, bool backward, cudaStream_t stream) {
  launch_gated<Bf16>(plan, backward, stream);
}
