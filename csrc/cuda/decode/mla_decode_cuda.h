// Decoding over latents on CUDA, and the products of the heads.
#pragma once
#include "decode/decode.h"

namespace attnjourney {

// The largest head dimensions of decode's own kernels. Attention's are for wider ones, but not for a ring beside a
// mask, which has columns for keys that are gone.
constexpr int64_t most_decode_dim = 256;
inline bool is_wide(const DecodeCall& c) { return c.head_dim > most_decode_dim || c.v_head_dim > most_decode_dim; }
inline bool is_masked_ring(const DecodeCall& c, const DecodeInputs& in) { return c.ring && in.options.attn_mask; }

// Is a call of decode one over latents that decode's own kernels do not take: values that are the front of their keys?
inline bool is_of_latents(const DecodeCall& c, const DecodeInputs& in) {
  const bool scaled_alike = !in.key_scale || in.key_scale->data_ptr() == in.value_scale->data_ptr();
  const bool one = scaled_alike && c.kv_heads == 1 && !c.ring && in.key.data_ptr() == in.value.data_ptr() &&
                   in.key.stride(0) == in.value.stride(0) && in.key.stride(2) == in.value.stride(2);
  return one && is_wide(c) && c.v_head_dim <= c.head_dim;
}
void cuda_decode_latents(const DecodeCall&, const DecodeInputs&, const Tensor& out, const Tensor& lse);

void cuda_dequantize(const Tensor& bytes, const Tensor& scale, const Tensor& out);  // see Dequantize

// see HeadProducts; by batched matrix products of ATen
void aten_head_products(const Tensor& x, const Tensor& w, bool transposed, const Tensor& out);

}  // namespace attnjourney
