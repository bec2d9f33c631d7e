#include "decode_bytes.h"

namespace attnjourney {
const CudaDecode sm80_decode_bytes_fp16{decode_bytes_tiling<Half>, launch_decode_bytes<Half>};
}  // namespace attnjourney
