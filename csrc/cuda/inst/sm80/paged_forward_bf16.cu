#include "paged_forward.h"

void attnjourney::sm80_paged_forward_bf16(ForwardTask task, const PagedKeys& pages, cudaStream_t stream) {
  launch_sm80_paged_forward<Bf16>(task, pages, stream);
}
