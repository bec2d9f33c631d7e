#include "latent.h"

namespace attnjourney {
const CudaDecode sm80_latent_fp64 = latent_fma_decode<double>;
}  // namespace attnjourney
