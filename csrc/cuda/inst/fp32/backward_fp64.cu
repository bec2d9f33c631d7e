#include "backward.h"

void attnjourney::fp32_backward_double(BackwardTaskOf<double> task, bool, const Device& device, cudaStream_t stream) {
  launch_fp32_backward<double>(task, device, stream);
}
