// What the CUDA kernels serve: everything else is refused, by name.
#pragma once
#include "attention/attention.h"
#include "cuda/launch.h"

namespace attnjourney {

inline void check_served(const AttentionCall& c, const AttentionOptions& options, bool backward) {
  // A field added to the options does not compile here before it is looked at.
  const auto& [attn_mask, dropout_p, is_causal, scale, enable_gqa, dropout_seed, causal_alignment, window,
               prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k,
               blocks] = options;
  // served, whatever they are
  (void)is_causal, (void)scale, (void)enable_gqa, (void)dropout_seed;
  (void)causal_alignment, (void)window, (void)prefix_length, (void)key_lengths, (void)query_lengths;
  (void)attn_mask, (void)dropout_p, (void)softcap, (void)sinks, (void)alibi_slopes, (void)cu_seqlens_q,
      (void)cu_seqlens_k, (void)blocks;
  const auto head_dim = static_cast<int>(std::min<int64_t>(c.params.head_dim, 1 << 20));
  const auto v_head_dim = static_cast<int>(std::min<int64_t>(c.params.v_head_dim, 1 << 20));
  check_value(
      backward ? backward_size(head_dim, v_head_dim) != 0 : forward_size(head_dim, v_head_dim) != HeadSize::none,
      "query: expected head dimensions of at most 256 on CUDA, got ", head_dim, " and (value) ", v_head_dim);
  const int64_t limit = 1 << 28;
  check_value(c.params.q_len < limit && c.params.kv_len < limit && c.batch * c.q_heads < limit,
              "query: expected fewer than 2^28 rows, keys and heads on CUDA");
}

}  // namespace attnjourney
