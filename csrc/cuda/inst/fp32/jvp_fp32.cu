#include "jvp.h"

namespace attnjourney {
void fp32_jvp_float(JvpTaskOf<float> task, cudaStream_t stream) { launch_fp32_jvp(task, stream); }
}  // namespace attnjourney
