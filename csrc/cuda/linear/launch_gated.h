// The launch functions of gated linear attention, one for each dtype: the kernels of a plan, one after the other.
#pragma once
#include "cuda/kernels/gated/plan.cuh"
#include "cuda/launch.h"

namespace attnjourney {

using GatedLaunchFunction = void (*)(const GatedPlan&, bool backward, cudaStream_t);
void sm80_gated_bf16(const GatedPlan&, bool backward, cudaStream_t);
void sm80_gated_fp16(const GatedPlan&, bool backward, cudaStream_t);
void sm80_gated_fp32(const GatedPlan&, bool backward, cudaStream_t);
void sm80_gated_fp64(const GatedPlan&, bool backward, cudaStream_t);

}  // namespace attnjourney
