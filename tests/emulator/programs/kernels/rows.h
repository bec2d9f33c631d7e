// The kernels of rows.cpp, and their instances.
#pragma once
#include "cuda/kernels/rows/rms_norm.cuh"
#include "cuda/kernels/rows/rotary.cuh"

namespace attnjourney {
#define OF_ONE_WIDTH(T, V)     \
  INSTANCE(rotary<T, V>);      \
  INSTANCE(rms_forward<T, V>); \
  INSTANCE(rms_grad_x<T, V>)
#define OF(T)                         \
  INSTANCE(rms_grad_weight_parts<T>); \
  INSTANCE(rms_grad_weight<T>);       \
  OF_ONE_WIDTH(T, 1);                 \
  OF_ONE_WIDTH(T, kVector<T>)
OF(float);
#ifndef FLOAT_ALONE
OF(double);
OF(Bf16);
OF(Half);
#endif
}  // namespace attnjourney
