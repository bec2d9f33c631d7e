// The kernels of caches of bytes, for every dtype of what is outside of them.
#include "cuda/cache/launch_cache.h"
#include "cuda/kernels/cache/byte_rows.cuh"

namespace attnjourney {
namespace {

template <class F>
void with_type(Number n, F&& f) {
  if (n == Number::fp32) return f.template operator()<float>();
  if (n == Number::bf16) return f.template operator()<Bf16>();
  f.template operator()<Half>();
}

}  // namespace

void launch_cache_append_bytes(const AppendTask& task, const AppendBytes& bytes, Number tokens, cudaStream_t stream) {
  with_type(tokens, [&]<class T>() {
    launch_kernel(cache_append_bytes<T>, int64_t{task.batch} * task.parts, kCacheThreads, 0, stream, task, bytes);
  });
  advance_lengths(task, stream);
}

void launch_cache_expand(const GatherTask& task, int sequences, Number to, cudaStream_t stream) {
  with_type(to, [&]<class T>() {
    launch_kernel(cache_expand<T>, int64_t{sequences} * task.parts, kCacheThreads, 0, stream, task);
  });
}

void launch_dequantize(ByteKind kind, const unsigned char* bytes, int64_t pitch, const float* scale, void* out,
                       Number number, int rows, int dim, int parts, cudaStream_t stream) {
  with_type(number, [&]<class T>() {
    launch_kernel(dequantize_rows<T>, parts, kCacheThreads, 0, stream, kind, bytes, pitch, scale, static_cast<T*>(out),
                  rows, dim);
  });
}

}  // namespace attnjourney
