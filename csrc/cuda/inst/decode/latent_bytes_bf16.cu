#include "latent.h"

namespace attnjourney {
const LatentDecode sm80_latent_bytes_bf16 = latent_decode<Bf16, true>;
}  // namespace attnjourney
