// What a kernel of attention is launched with, besides its task.
#pragma once
#include "cuda/architectures.h"
#include "cuda/device.h"

namespace attnjourney {

struct LaunchContext {
  const Tensor& query;  // memory is taken where it lies
  const Device& device;
  cudaStream_t stream;
  ElementType type;
  bool ranged;  // rows may not see all keys
};

inline ElementType element_type(ScalarType type) {
  if (type == ScalarType::Double) return ElementType::fp64;
  if (type == ScalarType::Float) return ElementType::fp32;
  return type == ScalarType::BFloat16 ? ElementType::bf16 : ElementType::fp16;
}

}  // namespace attnjourney
