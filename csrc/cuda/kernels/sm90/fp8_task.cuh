// The parameters of the Hopper forward over e4m3.
#pragma once
#include "cuda/kernels/common/forward_task.cuh"

namespace attnjourney {

// Scales of one tensor: that of rows [i * kFp8ScaleRows, (i + 1) * kFp8ScaleRows) at i * block; 0 where one is shared.
constexpr int kFp8ScaleRows = 128;
struct Fp8Scale {
  const float* data;
  int64_t batch, head, block;
};
enum class Fp8Out : int { bf16, fp16, fp32 };
struct Fp8Task : ForwardTask {
  Fp8Scale query_scale, key_scale, value_scale;
  Fp8Out out_type;
  int value_columns;  // of value in memory; v_head_dim: of the output, a multiple of 4
};

}  // namespace attnjourney
