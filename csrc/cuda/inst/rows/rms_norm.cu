#include "cuda/layers/rows.h"

namespace attnjourney {

void sm80_rms_forward(const RmsTask& task, Number n, bool vectors, cudaStream_t stream) {
  with_number(n, [&]<class T>() {
    launch_kernel(vectors ? rms_forward<T, kVector<T>> : rms_forward<T, 1>, rms_row_blocks(task), kRmsThreads, 0,
                  stream, task);
  });
}

void sm80_rms_grad_x(const RmsTask& task, Number n, bool vectors, cudaStream_t stream) {
  with_number(n, [&]<class T>() {
    launch_kernel(vectors ? rms_grad_x<T, kVector<T>> : rms_grad_x<T, 1>, rms_row_blocks(task), kRmsThreads, 0, stream,
                  task);
  });
}

void sm80_rms_grad_weight(const RmsTask& task, Number n, cudaStream_t stream) {
  with_number(n, [&]<class T>() {
    launch_kernel(rms_grad_weight_parts<T>, int64_t{task.spans} * rms_column_blocks(task), kRmsThreads, 0, stream,
                  task);
    launch_kernel(rms_grad_weight<T>, rms_column_blocks(task), kRmsThreads, 0, stream, task);
  });
}

}  // namespace attnjourney
