#include "columns_backward.h"

void attnjourney::sm90_columns_backward_fp16(BackwardTask task, bool ranged, const Device&, cudaStream_t stream) {
  launch_sm90_columns_backward<Half>(task, ranged, stream);
}
