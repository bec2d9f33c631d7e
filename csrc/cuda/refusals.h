// What the CUDA kernels serve: everything else is refused, by name. All options of attention and decoding are served; a
// field added to them is looked at in cuda/attention/options.h.
#pragma once
#include "attention/attention.h"
#include "cuda/decode/mla_decode_cuda.h"
#include "cuda/kernels/decode/latent_size.cuh"
#include "cuda/launch.h"
#include "decode/decode.h"
#include "linear/gated_linear_attention.h"
#include "linear/linear_attention.h"
#include "sparse/lightning_indexer.h"
#include "sparse/sparse_attention.h"

namespace attnjourney {

// The largest head dimensions of attention's kernels for tensors in one piece.
inline int64_t most_head_dim(ScalarType dtype) {
  return dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ? 512 : 256;
}
inline int64_t most_head_dim(const AttentionCall& c) {
  return c.args.options.block_table || c.args.fp8 ? 256 : most_head_dim(c.dtype);
}
constexpr int64_t most_tangent_dim = 256;  // ... of their derivatives in a direction
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
  const bool masked_ring = is_masked_ring(c, in);
  const int64_t most = masked_ring ? most_decode_dim : most_head_dim(in.query.scalar_type());
  check_value(c.head_dim <= most && c.v_head_dim <= most, "query: expected head dimensions of at most ", most,
              masked_ring ? " beside a mask over a ring" : "", " on CUDA, got ", c.head_dim, " and (value) ",
              c.v_head_dim);
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

// Are the values the front of their keys, of latents?
inline bool is_sparse_latent(const SparseCall& c, const SparseInputs& in) {
  const Tensor &k = in.key, &v = in.value;
  bool same = k.data_ptr() == v.data_ptr() && c.params.v_head_dim <= c.params.head_dim;
  for (int d = 0; d < 3; d++) same = same && (k.size(d) <= 1 || k.stride(d) == v.stride(d));
  same = same && aten::has_dense_rows(k) && aten::has_dense_rows(v);
  return same && (c.params.head_dim > 256 || c.params.v_head_dim > 256);
}

inline void check_sparse_served(const SparseCall& c, const SparseInputs& in) {
  const SparseParams& p = c.params;
  const bool latent = is_sparse_latent(c, in);
  check_value(
      latent ? p.v_head_dim <= kLatentValueDim && p.head_dim <= kLatentDim : p.head_dim <= 256 && p.v_head_dim <= 256,
      "query: expected head dimensions of at most 256 on CUDA, or ", kLatentDim, " and (value) ", kLatentValueDim,
      " where value is the front of key, got ", p.head_dim, " and (value) ", p.v_head_dim);
  const int64_t limit = 1 << 28;
  check_value(p.q_len < limit && p.kv_len < limit && c.batch * c.q_heads < limit && p.index_count < limit &&
                  p.group * std::min(p.rows, p.q_len) < limit,
              "query: expected fewer than 2^28 rows, keys, heads and indices of a row on CUDA");
}

inline void check_gated_served(const GatedCall& c) {
  const GatedParams& p = c.params;
  check_value(p.head_dim <= 256 && p.v_head_dim <= 256, "query: expected head dimensions of at most 256 on CUDA, got ",
              p.head_dim, " and (value) ", p.v_head_dim);
  const int64_t limit = 1 << 28;
  check_value(c.len < limit && c.sequences < limit && c.batch * c.out_heads() < limit && c.batch * c.len < 8 * limit,
              "query: expected fewer than 2^28 rows, sequences and heads on CUDA, and 2^31 rows of a head in all");
}

// index_count: of a row of indices, given or wanted
inline void check_indexer_served(const IndexerCall& c, int64_t index_count) {
  const IndexerParams& p = c.params;
  check_value(p.head_dim <= 256, "query: expected a head dimension of at most 256 for the indexer on CUDA, got ",
              p.head_dim);
  const int64_t limit = 1 << 28;
  check_value(p.q_len < limit && p.kv_len < limit && c.batch * p.heads < limit && index_count < limit,
              "query: expected fewer than 2^28 rows, keys, heads and indices of a row on CUDA");
}
inline void check_target_served(const IndexerTarget& t) {
  check_value(t.query.size(3) <= kLatentDim, "query: expected a head dimension of at most ", kLatentDim,
              " on CUDA, got ", t.query.size(3));
}

}  // namespace attnjourney
