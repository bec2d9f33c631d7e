#include "jvp.h"

namespace attnjourney {
void sm80_jvp_bf16(JvpTask task, cudaStream_t stream) { launch_sm80_jvp<Bf16>(task, stream); }
}  // namespace attnjourney
