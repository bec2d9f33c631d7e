// The kernels of decode.cpp, and their instances.
#pragma once
#include "cuda/kernels/decode/decode_fma.cuh"
#include "cuda/kernels/decode/decode_merge.cuh"
#include "cuda/kernels/decode/decode_mma.cuh"

using namespace attnjourney;
#ifdef BYTES
constexpr bool kBytes = true;
#else
constexpr bool kBytes = false;
#endif
#ifdef KERNEL
using T = KERNEL::T;
#else
using T = NUMBER;
#endif

namespace attnjourney {
#ifdef KERNEL
INSTANCE(decode_mma<KERNEL>);
#elif defined(BYTES)
INSTANCE(decode_bytes_fma<T>);
#else
INSTANCE(decode_fma<T>);
#endif
INSTANCE(decode_merge<T>);
}  // namespace attnjourney
