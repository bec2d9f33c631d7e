// The launches of the kernels that work row by row, and how an entry picks them.
#pragma once
#include "cuda/device.h"
#include "cuda/kernels/rows/rms_norm.cuh"
#include "cuda/kernels/rows/rotary.cuh"

namespace attnjourney {

// vectors: 16 bytes at once
void sm80_rotary(const RotaryTask&, Number, bool vectors, cudaStream_t);
void sm80_rms_forward(const RmsTask&, Number, bool vectors, cudaStream_t);
void sm80_rms_grad_x(const RmsTask&, Number, bool vectors, cudaStream_t);
void sm80_rms_grad_weight(const RmsTask&, Number, cudaStream_t);

// f.operator()<T>() with the kernels' type
template <class F>
void with_number(Number n, F&& f) {
  switch (n) {
    case Number::fp32:
      return f.template operator()<float>();
    case Number::fp64:
      return f.template operator()<double>();
    case Number::bf16:
      return f.template operator()<Bf16>();
    case Number::fp16:
      return f.template operator()<Half>();
  }
}

inline Number number_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return Number::fp64;
    case ScalarType::BFloat16:
      return Number::bf16;
    case ScalarType::Half:
      return Number::fp16;
    default:
      return Number::fp32;
  }
}

// whether p, and numbers so many apart, lie at multiples of 16 bytes
inline bool in_vectors(const void* p, Number n, std::initializer_list<int64_t> distances) {
  bool in = reinterpret_cast<uintptr_t>(p) % 16 == 0;
  for (const int64_t d : distances) in = in && d * bytes_of(n) % 16 == 0;
  return in;
}

}  // namespace attnjourney
