#include "backward.h"

void attnjourney::fp32_backward_float(BackwardTaskOf<float> task, bool, const Device& device, cudaStream_t stream) {
  launch_fp32_backward<float>(task, device, stream);
}

void attnjourney::fp32_head_gradients_float(const BackwardTaskOf<float>& task, cudaStream_t stream) {
  launch_head_gradients<float>(task, stream);
}
