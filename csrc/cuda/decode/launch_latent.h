// From the entry of decoding over latents to its kernels: see launch_decode.h.
#pragma once
#include "launch_decode.h"

namespace attnjourney {

// For 16-bit numbers in whole 16-byte chunks: blocks of 64 rows, and of 32, which fit every GPU's shared memory.
struct LatentDecode {
  CudaDecode large, small;
  CudaDecode fma;  // rows of any size
};
extern const LatentDecode sm80_latent_bf16, sm80_latent_fp16;
extern const CudaDecode sm80_latent_fp32, sm80_latent_fp64;
extern const LatentDecode sm80_latent_bytes_bf16, sm80_latent_bytes_fp16;  // over latents in bytes
extern const CudaDecode sm80_latent_bytes_fp32;
extern const CudaDecode sm90_latent_bf16, sm90_latent_fp16;  // what it serves: architectures.cu

}  // namespace attnjourney
