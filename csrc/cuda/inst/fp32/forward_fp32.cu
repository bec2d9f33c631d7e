#include "forward.h"

void attnjourney::fp32_forward_float(ForwardTaskOf<float> p, bool, const Device& device, cudaStream_t stream) {
  launch_fp32_forward<float>(p, device, stream);
}
