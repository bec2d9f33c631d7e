// The launch function of the Hopper forward with options for one dtype.
#pragma once
#include "cuda/kernels/sm90/full_forward.cuh"
#include "cuda/launch.h"
#include "cuda/tensor_map.h"

namespace attnjourney {

template <class T>
void launch_sm90_full_forward(ForwardTask p, const TileKinds& kinds, const Device& device, cudaStream_t stream) {
  const auto go = [&]<class S>() {
    constexpr bool bf16 = ptx::is_bf16<T>;
    plan_forward(p, S::kRows);
    const int kv_heads = p.q_heads / p.group, items = p.cu_q ? 1 : p.batch;
    const auto map = [&](const void* data, const Strides& s, int heads, int length, int dim, int rows) {
      return tensor_map(data, s, items, heads, length, dim, rows, bf16);
    };
    const auto value = [&](int rows) { return map(p.value, p.value_strides, kv_heads, p.kv_len, p.v_head_dim, rows); };
    Sm90ForwardMaps maps{};
    maps.query = map(p.query, p.query_strides, p.q_heads, p.q_len, p.head_dim, 64);
    maps.key = map(p.key, p.key_strides, kv_heads, p.kv_len, p.head_dim, S::kKeys);
    maps.value = value(S::kKeys), maps.value8 = value(8), maps.value1 = value(1);
    launch_kernel(sm90_full_forward<S>, p.total < device.multiprocessors ? p.total : device.multiprocessors,
                  S::kThreads, S::kSmemBytes, stream, maps, p, kinds);
  };
  const auto pick = [&]<bool Bias>() {
    const HeadSize size = forward_size(p.head_dim, p.v_head_dim);
    if (size == HeadSize::d128) return go.template operator()<Sm90FullShape<T, 128, 128, 2, Bias>>();
    if (size == HeadSize::d192v128) return go.template operator()<Sm90FullShape<T, 192, 128, 1, Bias>>();
    go.template operator()<Sm90FullShape<T, 64, 64, 2, Bias>>();
  };
  if (p.scores.mask_kind > MaskElement::boolean)
    pick.template operator()<true>();
  else
    pick.template operator()<false>();
}

}  // namespace attnjourney
