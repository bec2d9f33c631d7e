#include "jvp.h"

namespace attnjourney {
void sm80_jvp_fp16(JvpTask task, cudaStream_t stream) { launch_sm80_jvp<Half>(task, stream); }
}  // namespace attnjourney
