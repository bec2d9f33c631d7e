// float32 on Hopper: memory for the planes of halves, and the launches.
#pragma once
#include "cuda/device.h"

namespace attnjourney {

inline void fp16x2_forward(const ForwardTask& p, const Tensor& query, const Device& device, cudaStream_t stream) {
  const int64_t dim = backward_size(p.head_dim, p.v_head_dim), rows = 8192 / dim;
  Fp16x2Planes w{};
  w.kv_heads = p.q_heads / p.group;
  w.query_tiles = static_cast<int>((p.q_len + rows - 1) / rows);
  w.key_tiles = static_cast<int>((p.kv_len + rows - 1) / rows);
  const int64_t queries = int64_t{p.batch} * p.q_heads, keys = int64_t{p.batch} * w.kv_heads;
  const int64_t key_bytes = keys * p.kv_len * 4 * dim, key_scales = keys * w.key_tiles * 16;
  const int64_t query_bytes = queries * p.q_len * 4 * dim, query_scales = queries * w.query_tiles * 4;
  const Tensor memory =
      aten::empty(query, {query_bytes + 2 * key_bytes + key_scales + query_scales + 4}, ScalarType::Byte);
  w.query = static_cast<unsigned char*>(memory.data_ptr());
  w.key = w.query + query_bytes, w.value = w.key + key_bytes;
  w.key_scale = reinterpret_cast<float4*>(w.value + key_bytes);
  w.query_scale = reinterpret_cast<float*>(w.value + key_bytes + key_scales);
  w.needs_fallback = reinterpret_cast<uint32_t*>(w.query_scale + queries * w.query_tiles);
  cuda_check(cudaMemsetAsync(w.needs_fallback, 0, 4, stream), "cudaMemsetAsync");
  sm90_fp16x2_forward_float(p, w, device, stream);
  fp32_forward_fallback_float(p, w.needs_fallback, device, stream);
}

}  // namespace attnjourney
