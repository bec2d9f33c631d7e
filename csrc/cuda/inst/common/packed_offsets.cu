#include "cuda/kernels/common/packed_offsets.cuh"

#include "cuda/launch.h"

namespace attnjourney {

void packed_offsets_int32(const int* given, int count, int total, int* out, int* order, cudaStream_t stream) {
  launch_kernel(packed_offsets<int>, 1, kOffsetsThreads, kOffsetsBytes, stream, given, count, total, out, order);
}
void packed_offsets_int64(const int64_t* given, int count, int total, int* out, int* order, cudaStream_t stream) {
  launch_kernel(packed_offsets<int64_t>, 1, kOffsetsThreads, kOffsetsBytes, stream, given, count, total, out, order);
}

}  // namespace attnjourney
