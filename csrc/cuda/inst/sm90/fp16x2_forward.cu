#include "cuda/kernels/fp32/fp16x2_planes.cuh"
#include "cuda/kernels/sm90/fp16x2_forward.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"

namespace attnjourney {
namespace {

template <int D>
void launch_fp16x2_forward(ForwardTask task, const Fp16x2Planes& w, const Device& device, cudaStream_t stream) {
  using Shape = typename Sm90Fp16x2Forward<D>::Shape;
  const int64_t queries = int64_t{task.q_heads} * w.query_tiles, keys = int64_t{w.kv_heads} * w.key_tiles;
  launch_kernel(fp16x2_planes<D>, task.batch * (queries + 2 * keys), Fp16x2Size<D>::kThreads, Fp16x2Size<D>::kSmemBytes,
                stream, task, w);
  plan_forward(task, Shape::kRows, 4);
  const auto map = [&](const void* plane, int heads, int length, int rows) {
    const Strides dense{int64_t{heads} * length * 2 * D, int64_t{length} * 2 * D, 2 * D};
    return tensor_map(plane, dense, task.batch, heads, length, 2 * D, rows, false);
  };
  Sm90ForwardMaps maps{};
  maps.query = map(w.query, task.q_heads, task.q_len, 64);
  maps.key = map(w.key, w.kv_heads, task.kv_len, Shape::kKeys),
  maps.value = map(w.value, w.kv_heads, task.kv_len, Shape::kKeys);
  maps.value8 = map(w.value, w.kv_heads, task.kv_len, 8), maps.value1 = map(w.value, w.kv_heads, task.kv_len, 1);
  launch_kernel(sm90_fp16x2_forward<D>, task.total < device.multiprocessors ? task.total : device.multiprocessors,
                Shape::kThreads, Shape::kSmemBytes, stream, maps, task, w);
}

}  // namespace

void sm90_fp16x2_forward_float(ForwardTask task, const Fp16x2Planes& w, const Device& device, cudaStream_t stream) {
  if (backward_size(task.head_dim, task.v_head_dim) == 64) return launch_fp16x2_forward<64>(task, w, device, stream);
  launch_fp16x2_forward<128>(task, w, device, stream);
}

}  // namespace attnjourney
