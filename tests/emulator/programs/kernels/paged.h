// The kernels of paged.cpp, and their instances.
#pragma once
#include "cuda/kernels/decode/decode_fma.cuh"
#include "cuda/kernels/decode/decode_merge.cuh"
#include "cuda/kernels/decode/decode_mma.cuh"
#include "cuda/kernels/fp32/forward.cuh"
#include "cuda/kernels/sm80/forward.cuh"

using namespace attnjourney;
using T = KERNEL::T;

namespace attnjourney {
#ifdef FP32
INSTANCE(fp32_paged_forward<KERNEL>);
#else
INSTANCE(sm80_paged_forward<KERNEL>);
#endif
#ifdef DECODE
INSTANCE(decode_mma<DECODE>);
#else
INSTANCE(decode_fma<T>);
#endif
INSTANCE(decode_merge<T>);
}  // namespace attnjourney
