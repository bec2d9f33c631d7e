// From the entry of decoding to its kernels: one launch function per dtype (inst/).
#pragma once
#include "cuda/architectures.h"
#include "cuda/kernels/decode/decode_task.cuh"
#include "cuda/launch.h"
#include "decode_tiling.h"

namespace attnjourney {

// chunked: the caches' rows are whole 16-byte chunks
using DecodeTilingOf = DecodeTiling (*)(int head_dim, int v_head_dim, int rows, bool chunked);
using DecodeLaunch = void (*)(const DecodeTask&, bool chunked, cudaStream_t);
struct CudaDecode {
  DecodeTilingOf tiling;
  DecodeLaunch launch;  // and the merge, where keys are split
};
extern const CudaDecode sm80_decode_bf16, sm80_decode_fp16, sm80_decode_fp32, sm80_decode_fp64;
extern const CudaDecode sm80_decode_bytes_bf16, sm80_decode_bytes_fp16, sm80_decode_bytes_fp32;  // over caches of bytes

}  // namespace attnjourney
