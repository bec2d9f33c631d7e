// Decoding with keys shared out over blocks, whichever kernel it is.
#pragma once
#include "cuda/cache/cache_cuda.h"
#include "decode_cuda.h"

namespace attnjourney {

// Do rows consist of whole 16-byte chunks?
inline bool in_chunks(const Tensor& t) { return unit_of(t) == 16; }

// chunked: what `kernel` knows of the caches' rows (launch_decode.h); query has dense rows
void decode_split(const CudaDecode& kernel, bool chunked, const DecodeCall&, const DecodeInputs&, DecodeTask cache,
                  const Tensor& query, const Tensor& out, const Tensor& lse);  // decode.cu
DecodeTask describe_cache(const DecodeCall&, const DecodeInputs&);

}  // namespace attnjourney
