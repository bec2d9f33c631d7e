// The launch functions of linear attention, one for each dtype: the kernels of a plan, one after the other.
#pragma once
#include "cuda/kernels/linear/plan.cuh"
#include "cuda/launch.h"

namespace attnjourney {

using LinearLaunch = void (*)(const LinearProblem&, bool backward, cudaStream_t);
void sm80_linear_bf16(const LinearProblem&, bool backward, cudaStream_t);
void sm80_linear_fp16(const LinearProblem&, bool backward, cudaStream_t);
void sm80_linear_fp32(const LinearProblem&, bool backward, cudaStream_t);
void sm80_linear_fp64(const LinearProblem&, bool backward, cudaStream_t);

}  // namespace attnjourney
