// The launch function of the Hopper forward with options for one dtype.
#pragma once
#include "cuda/kernels/sm90/full_forward.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"

namespace attnjourney {

template <class T>
void launch_sm90_full_forward(ForwardTask task, const TileKinds& kinds, const Device& device, cudaStream_t stream) {
  const auto go = [&]<class Shape>() {
    constexpr bool bf16 = ptx::is_bf16<T>;
    plan_forward(task, Shape::kRows);
    const int kv_heads = task.q_heads / task.group, items = task.cu_q ? 1 : task.batch;
    const auto map = [&](const void* data, const Strides& s, int heads, int length, int dim, int rows) {
      return tensor_map(data, s, items, heads, length, dim, rows, bf16);
    };
    const auto value = [&](int rows) {
      return map(task.value, task.value_strides, kv_heads, task.kv_len, task.v_head_dim, rows);
    };
    Sm90ForwardMaps maps{};
    maps.query = map(task.query, task.query_strides, task.q_heads, task.q_len, task.head_dim, 64);
    maps.key = map(task.key, task.key_strides, kv_heads, task.kv_len, task.head_dim, Shape::kKeys);
    maps.value = value(Shape::kKeys), maps.value8 = value(8), maps.value1 = value(1);
    launch_kernel(sm90_full_forward<Shape>, task.total < device.multiprocessors ? task.total : device.multiprocessors,
                  Shape::kThreads, Shape::kSmemBytes, stream, maps, task, kinds);
  };
  const auto pick = [&]<bool Bias>() {
    const HeadSize size = forward_size(task.head_dim, task.v_head_dim);
    if (size == HeadSize::d128) return go.template operator()<Sm90FullShape<T, 128, 128, 2, Bias>>();
    if (size == HeadSize::d192v128) return go.template operator()<Sm90FullShape<T, 192, 128, 1, Bias>>();
    if (size == HeadSize::d256) return go.template operator()<Sm90FullShape<T, 256, 256, 1, Bias>>();
    go.template operator()<Sm90FullShape<T, 64, 64, 2, Bias>>();
  };
  if (task.scores.mask_kind > MaskElement::boolean)
    pick.template operator()<true>();
  else
    pick.template operator()<false>();
}

}  // namespace attnjourney
