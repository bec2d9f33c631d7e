// The backward of float32 in planes of halves: memory for these, as large as the inputs rounded up to 64 or 128
// columns, and the launches.
#pragma once
#include "cuda/device.h"

namespace attnjourney {

inline void fp16x2_backward(const BackwardTask& p, const Tensor& query, const Device& device, cudaStream_t stream) {
  const int64_t dim = backward_size(p.head_dim, p.v_head_dim), rows = 8192 / dim;
  Fp16x2BackwardPlanes w{};
  w.query_tiles = static_cast<int>((p.q_len + rows - 1) / rows);
  w.key_tiles = static_cast<int>((p.kv_len + rows - 1) / rows);
  const int64_t queries = int64_t{p.batch} * p.q_heads, keys = int64_t{p.batch} * p.kv_heads;
  const int64_t query_bytes = queries * p.q_len * 4 * dim, query_scales = queries * w.query_tiles * 16;
  const int64_t key_bytes = keys * p.kv_len * 4 * dim, key_scales = keys * w.key_tiles * 16;
  const Tensor memory =
      aten::empty(query, {2 * (query_bytes + key_bytes) + query_scales + key_scales + 4}, ScalarType::Byte);
  w.query = static_cast<unsigned char*>(memory.data_ptr()), w.grad_out = w.query + query_bytes;
  w.key = w.grad_out + query_bytes, w.value = w.key + key_bytes;
  w.query_scale = reinterpret_cast<float4*>(w.value + key_bytes);
  w.key_scale = w.query_scale + queries * w.query_tiles;
  w.needs_fallback = reinterpret_cast<uint32_t*>(w.key_scale + keys * w.key_tiles);
  cuda_check(cudaMemsetAsync(w.needs_fallback, 0, 4, stream), "cudaMemsetAsync");
  fp16x2_backward_float(p, w, device, stream);
}

}  // namespace attnjourney
