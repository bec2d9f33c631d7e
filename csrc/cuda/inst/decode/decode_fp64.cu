#include "decode.h"

namespace attnjourney {
const CudaDecode sm80_decode_fp64{decode_tiling<double>, launch_sm80_decode<double>};
}  // namespace attnjourney
