#include "paged_forward.h"

void attnjourney::fp32_paged_forward_double(ForwardTaskOf<double> task, const PagedKeys& pages, cudaStream_t stream) {
  launch_fp32_paged_forward<double>(task, pages, stream);
}
