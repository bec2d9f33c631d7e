// Decoding over latents on CUDA, and the products of the heads.
#pragma once
#include "decode/decode.h"

namespace attnjourney {

// Is a call of decode one over latents that decode's own kernels do not take: values that are the front of their keys?
inline bool is_of_latents(const DecodeCall& c, const DecodeInputs& in) {
  const bool scaled_alike = !in.key_scale || in.key_scale->data_ptr() == in.value_scale->data_ptr();
  const bool one = scaled_alike && c.kv_heads == 1 && !c.ring && in.key.data_ptr() == in.value.data_ptr() &&
                   in.key.stride(0) == in.value.stride(0) && in.key.stride(2) == in.value.stride(2);
  return one && (c.head_dim > 256 || c.v_head_dim > 256) && c.v_head_dim <= c.head_dim;
}
void cuda_decode_latents(const DecodeCall&, const DecodeInputs&, const Tensor& out, const Tensor& lse);

void cuda_dequantize(const Tensor& bytes, const Tensor& scale, const Tensor& out);  // see Dequantize

// see HeadProducts; by batched matrix products of ATen
void aten_head_products(const Tensor& x, const Tensor& w, bool transposed, const Tensor& out);

}  // namespace attnjourney
