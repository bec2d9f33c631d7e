#include "gated.h"

void attnjourney::sm80_gated_fp64(const GatedPlan& plan, bool backward, cudaStream_t stream) {
  launch_gated<double>(plan, backward, stream);
}
