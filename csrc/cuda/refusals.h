// What the CUDA kernels serve: everything else is refused, by name. All options of attention and decoding are served; a
// field added to them is looked at in cuda/attention/options.h.
#pragma once
#include "attention/attention.h"
#include "cuda/kernels/decode/latent_size.cuh"
#include "cuda/launch.h"
#include "decode/decode.h"
#include "linear/linear_attention.h"

namespace attnjourney {

// The largest head dimensions of the forward and the backward.
inline int64_t most_head_dim(const AttentionCall& c) {
  const bool is_16_bit = c.dtype == ScalarType::BFloat16 || c.dtype == ScalarType::Half;
  return is_16_bit && !c.args.options.block_table ? 512 : 256;
}
inline void check_served(const AttentionCall& c, int64_t most) {
  const int64_t head_dim = c.params.head_dim, v_head_dim = c.params.v_head_dim;
  check_value(head_dim <= most && v_head_dim <= most, "query: expected head dimensions of at most ", most,
              " on CUDA, got ", head_dim, " and (value) ", v_head_dim);
  const int64_t limit = 1 << 28;
  const int64_t blocks = c.args.options.block_table ? c.args.key.size(0) : 0;
  check_value(c.params.q_len < limit && c.params.kv_len < limit && c.batch * c.q_heads < limit && blocks < limit,
              "query: expected fewer than 2^28 rows, keys, heads and blocks on CUDA");
  check_value(!c.args.options.block_table || c.q_heads * c.params.q_len < limit,
              "query: expected fewer than 2^28 rows in all heads beside a block_table on CUDA");
  const Origin& o = c.args.options.origin;
  check_value(o.row < limit && o.key < limit && o.head < limit && c.batch * o.heads < limit,
              "origin: expected fewer than 2^28 rows, keys and heads on CUDA, got (", o.row, ", ", o.key, ", ", o.head,
              ", ", o.heads, ")");
}

// Lengths are on the device: a mask has as many columns as keys are looked at, and lengths beyond count as that many.
inline void check_decode_served(const DecodeCall& c, const DecodeInputs& in) {
  check_value(c.head_dim <= 256 && c.v_head_dim <= 256, "query: expected head dimensions of at most 256 on CUDA, got ",
              c.head_dim, " and (value) ", c.v_head_dim);
  const int64_t limit = int64_t{1} << 28, blocks = in.block_table ? in.key.size(0) : 0;
  check_value(c.capacity < limit && blocks < limit && c.prefix < limit && c.batch * c.q_heads * c.q_len < limit,
              "query: expected fewer than 2^28 rows, keys and blocks on CUDA");
  if (!in.options.attn_mask || c.ring) return;
  const int64_t keys = in.options.attn_mask->size(-1);
  check_value(keys <= std::max<int64_t>(1, c.capacity),
              "attn_mask: expected a last dimension of at most the capacity, ", c.capacity, ", got shape ",
              shape_text(*in.options.attn_mask));
}

inline void check_latent_served(const DecodeCall& c, const DecodeInputs& in) {
  check_value(c.v_head_dim <= kLatentValueDim && c.head_dim <= kLatentDim, "latent: expected at most ", kLatentValueDim,
              " numbers of a latent and ", kLatentDim, " with the rotary key on CUDA, got ", c.v_head_dim, " and ",
              c.head_dim);
  const int64_t limit = int64_t{1} << 28, blocks = in.block_table ? in.key.size(0) : 0;
  check_value(c.capacity < limit && blocks < limit && c.prefix < limit && c.batch * c.q_heads * c.q_len < limit,
              "query: expected fewer than 2^28 rows, keys and blocks on CUDA");
  if (!in.options.attn_mask) return;
  const int64_t keys = in.options.attn_mask->size(-1);
  check_value(keys <= std::max<int64_t>(1, c.capacity),
              "attn_mask: expected a last dimension of at most the capacity, ", c.capacity, ", got shape ",
              shape_text(*in.options.attn_mask));
}

inline void check_linear_served(const LinearCall& c) {
  const LinearParams& p = c.params;
  check_value(p.head_dim <= 256 && p.v_head_dim <= 256, "query: expected head dimensions of at most 256 on CUDA, got ",
              p.head_dim, " and (value) ", p.v_head_dim);
  const int64_t limit = 1 << 28;
  check_value(p.q_len < limit && p.kv_len < limit && c.batch * c.q_heads < limit,
              "query: expected fewer than 2^28 rows, keys and heads on CUDA");
}

}  // namespace attnjourney
