#include "decode_bytes.h"

namespace attnjourney {
const CudaDecode sm80_decode_bytes_bf16{decode_bytes_tiling<Bf16>, launch_decode_bytes<Bf16>};
}  // namespace attnjourney
