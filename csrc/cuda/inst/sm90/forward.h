// The launch function of the Hopper forward for one dtype, and the tile sizes that were fastest on an H100.
#pragma once
#include "cuda/clusters.h"
#include "cuda/kernels/sm90/forward.cuh"
#include "cuda/tensor_map.h"

namespace attnjourney {

template <class T>
void launch_sm90_forward(ForwardTask task, bool ranged, const Device& device, cudaStream_t stream) {
  const auto maps_of = [&]<class Shape>() {
    constexpr bool bf16 = ptx::is_bf16<T>;
    constexpr int kKeys = Shape::kKeys / Shape::kCluster;
    const int kv_heads = task.q_heads / task.group;
    return Sm90ForwardMaps{
        tensor_map(task.query, task.query_strides, task.batch, task.q_heads, task.q_len, task.head_dim, 64, bf16),
        tensor_map(task.key, task.key_strides, task.batch, kv_heads, task.kv_len, task.head_dim, kKeys, bf16),
        tensor_map(task.value, task.value_strides, task.batch, kv_heads, task.kv_len, task.v_head_dim, kKeys, bf16),
        tensor_map(task.out, task.out_strides, task.batch, task.q_heads, task.q_len, task.v_head_dim, 16, bf16),
        tensor_map(task.value, task.value_strides, task.batch, kv_heads, task.kv_len, task.v_head_dim, 8, bf16),
        tensor_map(task.value, task.value_strides, task.batch, kv_heads, task.kv_len, task.v_head_dim, 1, bf16)};
  };
  const auto go = [&]<class Shape>() {
    plan_forward(task, Shape::kRows);
    launch_kernel(sm90_forward<Shape>, task.total < device.multiprocessors ? task.total : device.multiprocessors,
                  Shape::kThreads, Shape::kSmemBytes, stream, maps_of.template operator()<Shape>(), task);
  };
  // in clusters, where the call is for them
  const auto go_in_pairs = [&]<class Shape>() {
    if constexpr (!Shape::kRanged) {
      using Paired = Sm90ClusterShape<Shape>;
      const ClusterLaunch<Sm90ForwardMaps, ForwardTask> launch{sm90_forward<Paired>, Paired::kCluster, Paired::kThreads,
                                                               Paired::kSmemBytes};
      plan_forward(task, Shape::kRows);
      if (const int grid = blocks_in_pairs(task.tiles, task.group, task.total, task.kv_len, device.multiprocessors,
                                           launch.resident(device))) {
        task.counter = nullptr;  // it would part the blocks of a cluster
        return launch.run(grid, stream, maps_of.template operator()<Paired>(), task);
      }
    }
    go.template operator()<Shape>();
  };
  // dtype, Dqk, Dv, warpgroups, keys, stages, Q stages, ranged, ping-pong, early, store
  const auto pick = [&]<bool Ranged>() {
    const HeadSize size = forward_size(task.head_dim, task.v_head_dim);
    if (size == HeadSize::d128)
      return go_in_pairs.template operator()<Sm90ForwardShape<T, 128, 128, 2, 128, 2, 2, Ranged, false, 4, true>>();
    if (size == HeadSize::d192v128)
      return go_in_pairs.template operator()<Sm90ForwardShape<T, 192, 128, 2, 128, 2, 1, Ranged, true, 4, false>>();
    if constexpr (!Ranged)  // else launches.cu takes the kernels with options: this one would spill
      if (size == HeadSize::d256)
        return go_in_pairs.template operator()<Sm90ForwardShape<T, 256, 256, 2, 64, 2, 1, Ranged, true, 4, false>>();
    if constexpr (Ranged)
      if (task.kv_len <= 1024)
        return go.template operator()<Sm90ForwardShape<T, 64, 64, 2, 128, 2, 2, true, true, 4, true>>();
    go.template operator()<Sm90ForwardShape<T, 64, 64, 3, 128, 2, 2, Ranged, true, 0, true>>();
  };
  if (ranged)
    pick.template operator()<true>();
  else
    pick.template operator()<false>();
}

}  // namespace attnjourney
