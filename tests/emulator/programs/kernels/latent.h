// The kernels of latent.cpp, and their instances: of them -DKERNEL=..., launched by -DFUNCTION=...
#pragma once
#include "cuda/kernels/decode/decode_merge.cuh"
#include "cuda/kernels/decode/latent_fma.cuh"
#include "cuda/kernels/decode/latent_mma.cuh"
#include "cuda/kernels/sm90/latent.cuh"

using namespace attnjourney;
using Kernel = KERNEL;
using T = Kernel::T;

namespace attnjourney {
INSTANCE(FUNCTION<Kernel>);
INSTANCE(decode_merge<T>);
}  // namespace attnjourney
