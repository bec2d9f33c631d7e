#include "latent.h"

namespace attnjourney {
const LatentDecode sm80_latent_bf16 = latent_decode<Bf16>;
}  // namespace attnjourney
