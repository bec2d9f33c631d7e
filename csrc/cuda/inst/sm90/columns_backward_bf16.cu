#include "columns_backward.h"

void attnjourney::sm90_columns_backward_bf16(BackwardTask task, bool ranged, const Device&, cudaStream_t stream) {
  launch_sm90_columns_backward<Bf16>(task, ranged, stream);
}
