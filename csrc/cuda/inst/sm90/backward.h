// The launch function of the Hopper backward for one dtype.
#pragma once
#include "cuda/inst/backward_passes.h"
#include "cuda/kernels/sm90/backward.cuh"
#include "cuda/tensor_map.h"

namespace attnjourney {

template <class Shape>
Sm90BackwardMaps sm90_backward_maps(const BackwardTask& task) {
  constexpr bool bf16 = ptx::is_bf16<typename Shape::T>;
  const int batch = task.cu_q ? 1 : task.batch;
  const auto query = [&](int rows) {
    return tensor_map(task.query, task.query_strides, batch, task.q_heads, task.q_len, task.head_dim, rows, bf16);
  };
  const auto key = [&](int rows) {
    return tensor_map(task.key, task.key_strides, batch, task.kv_heads, task.kv_len, task.head_dim, rows, bf16);
  };
  const auto value = [&](int rows) {
    return tensor_map(task.value, task.value_strides, batch, task.kv_heads, task.kv_len, task.v_head_dim, rows, bf16);
  };
  const auto grad_out = [&](int rows) {
    return tensor_map(task.grad_out, task.grad_out_strides, batch, task.q_heads, task.q_len, task.v_head_dim, rows,
                      bf16);
  };
  return {.query = query(Shape::kRows),
          .key = key(Shape::kKeys),
          .value = value(Shape::kKeys),
          .grad_out = grad_out(Shape::kRows),
          .query8 = query(8),
          .key8 = key(8),
          .value8 = value(8),
          .grad_out8 = grad_out(8),
          .query1 = query(1),
          .key1 = key(1),
          .value1 = value(1),
          .grad_out1 = grad_out(1)};
}

// The passes and the kernel; grid: see sm90_backward.
template <class Shape>
void launch_sm90_backward_kernel(const BackwardTask& task, cudaStream_t stream,
                                 void (*kernel)(Sm90BackwardMaps, BackwardTask)) {
  launch_backward<Shape>(task, stream, [&] {
    if (task.key_tiles == 0) return;
    const Sm90BackwardMaps maps = sm90_backward_maps<Shape>(task);
    launch_kernel(kernel, int64_t{task.key_tiles} * (task.key_value_sum ? task.q_heads : task.kv_heads) * task.batch,
                  Shape::kThreads, Shape::kSmemBytes, stream, maps, task);
  });
}

template <class T>
void launch_sm90_backward(const BackwardTask& task, bool ranged, cudaStream_t stream) {
  const auto go = [&]<class Shape>() {
    launch_sm90_backward_kernel<Shape>(task, stream, ranged ? sm90_backward<Shape, true> : sm90_backward<Shape, false>);
  };
  const auto pick = [&]<bool Deterministic>() {
    if (backward_size(task.head_dim, task.v_head_dim) == 64)
      go.template operator()<Sm90BackwardShape<T, 64, 128, Deterministic>>();
    else
      go.template operator()<Sm90BackwardShape<T, 128, 64, Deterministic>>();
  };
  if (task.turn)
    pick.template operator()<true>();
  else
    pick.template operator()<false>();
}

}  // namespace attnjourney
