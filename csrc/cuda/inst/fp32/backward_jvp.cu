#include "cuda/inst/backward_jvp.h"
#include "cuda/kernels/fp32/backward_jvp.cuh"

namespace attnjourney {

void fp32_backward_jvp_float(BackwardJvpTaskOf<float> task, cudaStream_t stream) {
  launch_backward_jvp<Fp32BackwardJvpMath<float>>(task, stream);
}
void fp32_backward_jvp_double(BackwardJvpTaskOf<double> task, cudaStream_t stream) {
  launch_backward_jvp<Fp32BackwardJvpMath<double>>(task, stream);
}

}  // namespace attnjourney
