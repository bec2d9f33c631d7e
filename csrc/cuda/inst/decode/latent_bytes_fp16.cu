#include "latent.h"

namespace attnjourney {
const LatentDecode sm80_latent_bytes_fp16 = latent_decode<Half, true>;
}  // namespace attnjourney
