#include "latent.h"

namespace attnjourney {
const CudaDecode sm80_latent_bytes_fp32 = latent_fma_decode<float, true>;
}  // namespace attnjourney
