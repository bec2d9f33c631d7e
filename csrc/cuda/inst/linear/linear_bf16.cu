#include "linear.h"

void attnjourney::sm80_linear_bf16(const LinearProblem& task, bool backward, cudaStream_t stream) {
  launch_sm80_linear<Bf16>(task, backward, stream);
}
