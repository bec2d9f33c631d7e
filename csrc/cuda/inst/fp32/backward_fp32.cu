#include "backward.h"

void attnjourney::wide_backward_fp32(BackwardTaskOf<float> p, bool, const Device& device, cudaStream_t stream) {
  launch_wide_backward<float>(p, device, stream);
}
