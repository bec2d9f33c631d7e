#include "backward.h"

void attnjourney::fp32_backward_double(BackwardTaskOf<double> task, bool, const Device& device, cudaStream_t stream) {
  launch_fp32_backward<double>(task, device, stream);
}

void attnjourney::fp32_head_gradients_double(const BackwardTaskOf<double>& task, cudaStream_t stream) {
  launch_head_gradients<double>(task, stream);
}
