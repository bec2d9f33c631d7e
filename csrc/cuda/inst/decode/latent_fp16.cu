#include "latent.h"

namespace attnjourney {
const LatentDecode sm80_latent_fp16 = latent_decode<Half>;
}  // namespace attnjourney
