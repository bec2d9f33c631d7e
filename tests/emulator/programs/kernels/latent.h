// The kernels of latent.cpp, and their instances: of them -DKERNEL=..., launched by -DFUNCTION=...; -DSHARES_ALL:
// its blocks share the keys of all sequences
#pragma once
#include "cuda/kernels/decode/decode_merge.cuh"
#include "cuda/kernels/decode/latent_fma.cuh"
#include "cuda/kernels/decode/latent_mma.cuh"
#include "cuda/kernels/decode/ragged_merge.cuh"
#include "cuda/kernels/sm90/latent.cuh"

using namespace attnjourney;
using Kernel = KERNEL;
using T = Kernel::T;

namespace attnjourney {
INSTANCE(FUNCTION<Kernel>);
#ifdef SHARES_ALL
INSTANCE(ragged_merge<T>);
#else
INSTANCE(decode_merge<T>);
#endif
}  // namespace attnjourney
