#include "cuda/inst/backward_jvp.h"
#include "cuda/kernels/sm80/backward_jvp.cuh"

namespace attnjourney {

void sm80_backward_jvp_bf16(BackwardJvpTaskOf<float> task, cudaStream_t stream) {
  launch_backward_jvp<Sm80BackwardJvpMath<Bf16>>(task, stream);
}
void sm80_backward_jvp_fp16(BackwardJvpTaskOf<float> task, cudaStream_t stream) {
  launch_backward_jvp<Sm80BackwardJvpMath<Half>>(task, stream);
}

}  // namespace attnjourney
