// Decoding on CUDA.
#pragma once
#include "decode/decode.h"
#include "launch_decode.h"

namespace attnjourney {

void cuda_decode(const DecodeCall&, const DecodeInputs&, const Tensor& out, const Tensor& lse);
// the kernels of few rows, for queries of that dtype; bytes: over caches of bytes
const CudaDecode& decode_kernel(ScalarType query, bool bytes = false);
// many query rows, or wide heads, through attention's own kernels (decode_tiled.cu)
void cuda_decode_tiled(const DecodeCall&, const DecodeInputs&, const DecodeTask& cache, const Tensor& query,
                       const Tensor& out, const Tensor& lse);

}  // namespace attnjourney
