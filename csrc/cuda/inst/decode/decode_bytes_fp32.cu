#include "decode_bytes.h"

namespace attnjourney {
const CudaDecode sm80_decode_bytes_fp32{decode_bytes_tiling<float>, launch_decode_bytes<float>};
}  // namespace attnjourney
