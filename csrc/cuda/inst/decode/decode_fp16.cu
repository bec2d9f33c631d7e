#include "decode.h"

namespace attnjourney {
const CudaDecode sm80_decode_fp16{decode_tiling<Half>, launch_sm80_decode<Half>};
}  // namespace attnjourney
