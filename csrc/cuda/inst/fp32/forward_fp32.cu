#include "forward.h"

void attnjourney::fp32_forward_float(ForwardTaskOf<float> task, bool, const Device& device, cudaStream_t stream) {
  launch_fp32_forward<float>(task, device, stream);
}
