#include "paged_forward.h"

void attnjourney::fp32_paged_forward_float(ForwardTaskOf<float> task, const PagedKeys& pages, cudaStream_t stream) {
  launch_fp32_paged_forward<float>(task, pages, stream);
}
