// The launch function of the Hopper backward for one dtype.
#pragma once
#include "cuda/inst/backward_passes.h"
#include "cuda/kernels/sm90/backward.cuh"
#include "cuda/tensor_map.h"

namespace attnjourney {

template <class S>
Sm90BackwardMaps sm90_backward_maps(const BackwardTask& p) {
  constexpr bool bf16 = ptx::is_bf16<typename S::T>;
  const int batch = p.cu_q ? 1 : p.batch;
  const auto query = [&](int rows) {
    return tensor_map(p.query, p.query_strides, batch, p.q_heads, p.q_len, p.head_dim, rows, bf16);
  };
  const auto key = [&](int rows) {
    return tensor_map(p.key, p.key_strides, batch, p.kv_heads, p.kv_len, p.head_dim, rows, bf16);
  };
  const auto value = [&](int rows) {
    return tensor_map(p.value, p.value_strides, batch, p.kv_heads, p.kv_len, p.v_head_dim, rows, bf16);
  };
  const auto grad_out = [&](int rows) {
    return tensor_map(p.grad_out, p.grad_out_strides, batch, p.q_heads, p.q_len, p.v_head_dim, rows, bf16);
  };
  return {query(S::kRows), key(S::kKeys), value(S::kKeys), grad_out(S::kRows), query(8),   key(8), value(8),
          grad_out(8),     query(1),      key(1),          value(1),           grad_out(1)};
}

template <class T>
void launch_sm90_backward(const BackwardTask& p, bool ranged, cudaStream_t stream) {
  const auto go = [&]<class S>() {
    launch_backward<S>(p, stream, [&] {
      if (p.key_tiles == 0) return;
      const Sm90BackwardMaps maps = sm90_backward_maps<S>(p);
      launch_kernel(ranged ? sm90_backward<S, true> : sm90_backward<S, false>,
                    int64_t{p.key_tiles} * (p.key_value_sum ? p.q_heads : p.kv_heads) * p.batch, S::kThreads,
                    S::kSmemBytes, stream, maps, p);
    });
  };
  const auto pick = [&]<bool Deterministic>() {
    if (backward_size(p.head_dim, p.v_head_dim) == 64)
      go.template operator()<Sm90BackwardShape<T, 64, 128, Deterministic>>();
    else
      go.template operator()<Sm90BackwardShape<T, 128, 64, Deterministic>>();
  };
  if (p.turn)
    pick.template operator()<true>();
  else
    pick.template operator()<false>();
}

}  // namespace attnjourney
