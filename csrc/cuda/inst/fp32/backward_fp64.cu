#include "backward.h"

void attnjourney::wide_backward_fp64(BackwardTaskOf<double> p, bool, const Device& device, cudaStream_t stream) {
  launch_wide_backward<double>(p, device, stream);
}
