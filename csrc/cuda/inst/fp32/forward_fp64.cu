#include "forward.h"

void attnjourney::wide_forward_fp64(ForwardTaskOf<double> p, bool, const Device& device, cudaStream_t stream) {
  launch_wide_forward<double>(p, device, stream);
}
