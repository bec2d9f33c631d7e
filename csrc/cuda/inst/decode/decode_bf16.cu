#include "decode.h"

namespace attnjourney {
const CudaDecode sm80_decode_bf16{decode_tiling<Bf16>, launch_sm80_decode<Bf16>};
}  // namespace attnjourney
