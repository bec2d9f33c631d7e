#include "forward.h"

void attnjourney::fp32_forward_double(ForwardTaskOf<double> p, bool, const Device& device, cudaStream_t stream) {
  launch_fp32_forward<double>(p, device, stream);
}
