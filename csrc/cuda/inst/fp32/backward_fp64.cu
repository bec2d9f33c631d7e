#include "backward.h"

void attnjourney::fp32_backward_double(BackwardTaskOf<double> p, bool, const Device& device, cudaStream_t stream) {
  launch_fp32_backward<double>(p, device, stream);
}
