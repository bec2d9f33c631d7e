// Decoding over latents on CUDA: what it serves, and the products of the heads.
#pragma once
#include "cuda/kernels/decode/latent_size.cuh"
#include "decode/mla_decode.h"

namespace attnjourney {

inline void check_latent_served(const DecodeCall& c, const DecodeInputs& in) {
  check_value(c.v_head_dim <= kLatentValueDim && c.head_dim <= kLatentDim, "latent: expected at most ", kLatentValueDim,
              " numbers of a latent and ", kLatentDim, " with the rotary key on CUDA, got ", c.v_head_dim, " and ",
              c.head_dim);
  const int64_t limit = int64_t{1} << 28, blocks = in.block_table ? in.key.size(0) : 0;
  check_value(c.capacity < limit && blocks < limit && c.prefix < limit && c.batch * c.q_heads * c.q_len < limit,
              "query: expected fewer than 2^28 rows, keys and blocks on CUDA");
  if (!in.attn_mask) return;
  const int64_t keys = in.attn_mask->size(-1);
  check_value(keys <= std::max<int64_t>(1, c.capacity),
              "attn_mask: expected a last dimension of at most the capacity, ", c.capacity, ", got shape ",
              shape_text(*in.attn_mask));
}

// Is a call of decode one over latents that decode's own kernels do not take: values that are the front of their keys?
inline bool is_of_latents(const DecodeCall& c, const DecodeInputs& in) {
  const bool one = c.kv_heads == 1 && !c.ring && in.key.data_ptr() == in.value.data_ptr() &&
                   in.key.stride(0) == in.value.stride(0) && in.key.stride(2) == in.value.stride(2);
  return one && (c.head_dim > 256 || c.v_head_dim > 256) && c.v_head_dim <= c.head_dim;
}
void cuda_decode_latents(const DecodeCall&, const DecodeInputs&, const Tensor& out, const Tensor& lse);

// see HeadProducts; by batched matrix products of ATen
void aten_head_products(const Tensor& x, const Tensor& w, bool transposed, const Tensor& out);

}  // namespace attnjourney
