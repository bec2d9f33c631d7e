#include "latent.h"

namespace attnjourney {
const CudaDecode sm90_latent_fp16 = sm90_latent_decode<Half>;
}  // namespace attnjourney
