#include "linear.h"

void attnjourney::sm80_linear_fp64(const LinearProblem& task, bool backward, cudaStream_t stream) {
  launch_sm80_linear<double>(task, backward, stream);
}
