// The launch of the Hopper forward over e4m3.
#include "cuda/kernels/sm90/fp8_forward.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"

void attnjourney::sm90_fp8_forward_e4m3(Fp8Task task, cudaStream_t stream) {
  const auto go = [&]<class Shape>() {
    plan_forward(task, Shape::kRows, 1);
    const int kv_heads = task.q_heads / task.group;
    const auto map = [&](const void* data, const Strides& s, int heads, int length, int dim, int rows) {
      return tensor_map(data, s, task.batch, heads, length, dim, rows, MapElement::byte, Shape::kLine);
    };
    const Sm90Fp8Maps maps{
        map(task.query, task.query_strides, task.q_heads, task.q_len, task.head_dim, 64),
        map(task.key, task.key_strides, kv_heads, task.kv_len, task.head_dim, Shape::kKeys),
        map(task.value, task.value_strides, kv_heads, task.kv_len, task.value_columns, Shape::kKeys)};
    launch_kernel(sm90_fp8_forward<Shape>, task.total, Shape::kThreads, Shape::kSmemBytes, stream, maps, task);
  };
  switch (backward_size(task.head_dim, task.value_columns)) {
    case 64:
      return go.template operator()<Sm90Fp8Shape<64, 128, 3>>();
    case 128:
      return go.template operator()<Sm90Fp8Shape<128, 128, 3>>();
    default:
      return go.template operator()<Sm90Fp8Shape<256, 64, 3>>();
  }
}
