#include "latent.h"

namespace attnjourney {
const CudaDecode sm90_latent_bf16 = sm90_latent_decode<Bf16>;
}  // namespace attnjourney
