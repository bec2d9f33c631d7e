#include "backward.h"

void attnjourney::fp32_backward_float(BackwardTaskOf<float> task, bool, const Device& device, cudaStream_t stream) {
  launch_fp32_backward<float>(task, device, stream);
}
