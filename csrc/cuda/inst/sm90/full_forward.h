// The launch function of the Hopper forward with options for one dtype.
#pragma once
#include "cuda/kernels/common/mask_tiles.cuh"
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
    Sm90FullForwardMaps maps{};
    maps.query = map(task.query, task.query_strides, task.q_heads, task.q_len, task.head_dim, 64);
    maps.key = map(task.key, task.key_strides, kv_heads, task.kv_len, task.head_dim, Shape::kKeys);
    maps.value = value(Shape::kKeys), maps.value8 = value(8), maps.value1 = value(1);
    if (const Scores& s = task.scores; tma_takes_mask(s)) {
      const int64_t item = single_batch_stride(s, s.mask_batch), words = s.mask_bytes / 2;
      maps.mask_tiles = true, maps.mask_batched = item > 0;
      maps.mask = tensor_map(s.mask, {item * words, s.mask_head * words, s.mask_row * words}, item > 0 ? task.batch : 1,
                             s.mask_head > 0 ? task.q_heads : 1, s.mask_row > 0 ? task.q_len : 1,
                             static_cast<int>(task.kv_len * words), s.mask_row > 0 ? Shape::kRows : 1, bf16);
    }
    launch_kernel(sm90_full_forward<Shape>, task.total < device.multiprocessors ? task.total : device.multiprocessors,
                  Shape::kThreads, Shape::kSmemBytes, stream, maps, task, kinds);
  };
  const auto pick = [&]<MaskElement Mask>() {
    const HeadSize size = forward_size(task.head_dim, task.v_head_dim);
    if (size == HeadSize::d128) return go.template operator()<Sm90FullShape<T, 128, 128, Mask>>();
    if (size == HeadSize::d192v128) return go.template operator()<Sm90FullShape<T, 192, 128, Mask>>();
    if (size == HeadSize::d256) return go.template operator()<Sm90FullShape<T, 256, 256, Mask>>();
    go.template operator()<Sm90FullShape<T, 64, 64, Mask>>();
  };
  if (task.scores.mask_kind == MaskElement::same)
    pick.template operator()<MaskElement::same>();
  else if (task.scores.mask_kind == MaskElement::fp32)
    pick.template operator()<MaskElement::fp32>();
  else
    pick.template operator()<MaskElement::none>();
}

}  // namespace attnjourney
