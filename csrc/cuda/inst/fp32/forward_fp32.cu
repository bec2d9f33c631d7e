#include "forward.h"

void attnjourney::wide_forward_fp32(ForwardTaskOf<float> p, bool, const Device& device, cudaStream_t stream) {
  launch_wide_forward<float>(p, device, stream);
}
