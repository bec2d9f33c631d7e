// Launch functions of the kernel that writes weights, one for each dtype (inst/common/attention_weights.cu).
#pragma once
#include "cuda/kernels/common/attention_weights.cuh"
#include "cuda/launch.h"

namespace attnjourney {

void attention_weights_bf16(const WeightsTask<float>&, cudaStream_t);
void attention_weights_fp16(const WeightsTask<float>&, cudaStream_t);
void attention_weights_fp32(const WeightsTask<float>&, cudaStream_t);
void attention_weights_fp64(const WeightsTask<double>&, cudaStream_t);

}  // namespace attnjourney
