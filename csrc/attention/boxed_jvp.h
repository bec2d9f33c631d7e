// The derivatives of attention and of its backward as the dispatcher calls them; see attention/boxed.h.
#pragma once
#include "boxed.h"

namespace attnjourney {

template <const AttentionBackend& backend>
struct AttentionDerivatives : AttentionOperators<backend> {
  using Base = AttentionOperators<backend>;
  using Base::check_packed_rank, Base::dense_need, Base::packed, Base::window_of;
  using typename Base::PackedGradientTuple;

  static Tensor swapped(const Tensor& t) { return Base::swapped(t); }
  static OptionalTensor swapped(const char* name, const OptionalTensor& t) {
    if (!t) return t;
    check_dim(name, *t, 3);
    return swapped(*t);
  }

  static std::tuple<Tensor, Tensor> jvp(
      const Tensor& query, const Tensor& key, const Tensor& value, OptionalTensor attn_mask, const Tensor& out,
      const Tensor& lse, OptionalTensor query_tangent, OptionalTensor key_tangent, OptionalTensor value_tangent,
      OptionalTensor attn_mask_tangent, OptionalTensor sinks_tangent, OptionalTensor alibi_slopes_tangent,
      double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa, int64_t causal_alignment,
      std::vector<int64_t> window_size, int64_t prefix_length, OptionalTensor key_lengths, OptionalTensor query_lengths,
      double softcap, OptionalTensor sinks, OptionalTensor alibi_slopes, OptionalTensor dropout_seed) {
    return attention_jvp(
        backend, query, key, value,
        {attn_mask, dropout_p, is_causal, scale, enable_gqa, dropout_seed, causal_alignment, window_of(window_size),
         prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes, std::nullopt, std::nullopt},
        out, lse,
        {query_tangent, key_tangent, value_tangent, attn_mask_tangent, sinks_tangent, alibi_slopes_tangent,
         std::nullopt, std::nullopt, std::nullopt, std::nullopt});
  }

  static AttentionGradientTuple backward_jvp(
      const Tensor& grad_out, OptionalTensor grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
      OptionalTensor attn_mask, const Tensor& out, const Tensor& lse, const Tensor& out_tangent,
      const Tensor& lse_tangent, OptionalTensor grad_out_tangent, OptionalTensor grad_lse_tangent,
      OptionalTensor query_tangent, OptionalTensor key_tangent, OptionalTensor value_tangent,
      OptionalTensor attn_mask_tangent, OptionalTensor sinks_tangent, OptionalTensor alibi_slopes_tangent,
      double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa, int64_t causal_alignment,
      std::vector<int64_t> window_size, int64_t prefix_length, OptionalTensor key_lengths, OptionalTensor query_lengths,
      double softcap, OptionalTensor sinks, OptionalTensor alibi_slopes, OptionalTensor dropout_seed, int64_t need) {
    const AttentionTangents tangents{query_tangent, key_tangent,          value_tangent,    attn_mask_tangent,
                                     sinks_tangent, alibi_slopes_tangent, grad_out_tangent, grad_lse_tangent,
                                     out_tangent,   lse_tangent};
    return attention_backward(
        backend, grad_out, grad_lse, query, key, value,
        {attn_mask, dropout_p, is_causal, scale, enable_gqa, dropout_seed, causal_alignment, window_of(window_size),
         prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes, std::nullopt, std::nullopt},
        out, lse, need, &tangents);
  }

  static std::tuple<Tensor, Tensor> varlen_jvp(const Tensor& query, const Tensor& key, const Tensor& value,
                                               const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                               const Tensor& out, const Tensor& lse, OptionalTensor query_tangent,
                                               OptionalTensor key_tangent, OptionalTensor value_tangent,
                                               OptionalTensor sinks_tangent, OptionalTensor alibi_slopes_tangent,
                                               double dropout_p, bool is_causal, std::optional<double> scale,
                                               int64_t causal_alignment, std::vector<int64_t> window_size,
                                               int64_t prefix_length, double softcap, OptionalTensor sinks,
                                               OptionalTensor alibi_slopes, OptionalTensor dropout_seed) {
    check_packed_rank(query, key, value);
    check_dim("out", out, 3);
    const auto [out_tangent, lse_tangent] = attention_jvp(
        backend, swapped(query), swapped(key), swapped(value),
        {std::nullopt, dropout_p, is_causal, scale, true, dropout_seed, causal_alignment, window_of(window_size),
         prefix_length, std::nullopt, std::nullopt, softcap, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k},
        swapped(out), lse,
        {swapped("query_tangent", query_tangent), swapped("key_tangent", key_tangent),
         swapped("value_tangent", value_tangent), std::nullopt, sinks_tangent, alibi_slopes_tangent, std::nullopt,
         std::nullopt, std::nullopt, std::nullopt});
    return {swapped(out_tangent), lse_tangent};
  }

  static PackedGradientTuple varlen_backward_jvp(
      const Tensor& grad_out, OptionalTensor grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
      const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const Tensor& out, const Tensor& lse,
      const Tensor& out_tangent, const Tensor& lse_tangent, OptionalTensor grad_out_tangent,
      OptionalTensor grad_lse_tangent, OptionalTensor query_tangent, OptionalTensor key_tangent,
      OptionalTensor value_tangent, OptionalTensor sinks_tangent, OptionalTensor alibi_slopes_tangent, double dropout_p,
      bool is_causal, std::optional<double> scale, int64_t causal_alignment, std::vector<int64_t> window_size,
      int64_t prefix_length, double softcap, OptionalTensor sinks, OptionalTensor alibi_slopes,
      OptionalTensor dropout_seed, int64_t need) {
    check_packed_rank(query, key, value);
    check_dim("grad_out", grad_out, 3);
    check_dim("out", out, 3);
    const AttentionTangents tangents{swapped("query_tangent", query_tangent),
                                     swapped("key_tangent", key_tangent),
                                     swapped("value_tangent", value_tangent),
                                     std::nullopt,
                                     sinks_tangent,
                                     alibi_slopes_tangent,
                                     swapped("grad_out_tangent", grad_out_tangent),
                                     grad_lse_tangent,
                                     swapped("out_tangent", out_tangent),
                                     lse_tangent};
    return packed(attention_backward(
        backend, swapped(grad_out), grad_lse, swapped(query), swapped(key), swapped(value),
        {std::nullopt, dropout_p, is_causal, scale, true, dropout_seed, causal_alignment, window_of(window_size),
         prefix_length, std::nullopt, std::nullopt, softcap, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k},
        swapped(out), lse, dense_need(need), &tangents));
  }
};

}  // namespace attnjourney
