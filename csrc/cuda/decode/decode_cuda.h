// Decoding on CUDA, and what it serves.
#pragma once
#include <limits>

#include "decode/decode.h"
#include "launch_decode.h"

namespace attnjourney {

void cuda_decode(const DecodeCall&, const DecodeInputs&, const Tensor& out, const Tensor& lse);
// many query rows, through attention's own kernels (decode_tiled.cu)
void cuda_decode_tiled(const DecodeCall&, const DecodeInputs&, const DecodeTask& cache, const Tensor& query,
                       const Tensor& out, const Tensor& lse);

// Lengths are on the device: a mask has as many columns as keys are looked at, and lengths beyond count as that many.
inline void check_decode_served(const DecodeCall& c, const DecodeInputs& in) {
  check_value(c.head_dim <= 256 && c.v_head_dim <= 256, "query: expected head dimensions of at most 256 on CUDA, got ",
              c.head_dim, " and (value) ", c.v_head_dim);
  const int64_t limit = int64_t{1} << 28, blocks = in.block_table ? in.key.size(0) : 0;
  check_value(c.capacity < limit && blocks < limit && c.prefix < limit && c.batch * c.q_heads * c.q_len < limit,
              "query: expected fewer than 2^28 rows, keys and blocks on CUDA");
  if (!in.attn_mask || c.ring) return;
  const int64_t keys = in.attn_mask->size(-1);
  check_value(keys <= std::max<int64_t>(1, c.capacity),
              "attn_mask: expected a last dimension of at most the capacity, ", c.capacity, ", got shape ",
              shape_text(*in.attn_mask));
}

}  // namespace attnjourney
