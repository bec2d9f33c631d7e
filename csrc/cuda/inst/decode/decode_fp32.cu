#include "decode.h"

namespace attnjourney {
const CudaDecode sm80_decode_fp32{decode_tiling<float>, launch_sm80_decode<float>};
}  // namespace attnjourney
