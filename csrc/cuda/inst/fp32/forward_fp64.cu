#include "forward.h"

void attnjourney::fp32_forward_double(ForwardTaskOf<double> task, bool, const Device& device, cudaStream_t stream) {
  launch_fp32_forward<double>(task, device, stream);
}
