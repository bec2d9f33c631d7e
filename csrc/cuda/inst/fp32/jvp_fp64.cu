#include "jvp.h"

namespace attnjourney {
void fp32_jvp_double(JvpTaskOf<double> task, cudaStream_t stream) { launch_fp32_jvp(task, stream); }
}  // namespace attnjourney
