// The attention operators as the dispatcher calls them, over a device's backend: to be registered with TORCH_BOX.
#pragma once
#include "operators.h"

namespace attnjourney {

template <const AttentionBackend& backend>
struct AttentionOperators {
  static std::array<int64_t, 2> window_of(const std::vector<int64_t>& w) {
    check_value(w.size() == 2, "window_size: expected two numbers (left, right), got ", w.size());
    return {w[0], w[1]};
  }

  static std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                            OptionalTensor attn_mask, double dropout_p, bool is_causal,
                                            std::optional<double> scale, bool enable_gqa, int64_t causal_alignment,
                                            std::vector<int64_t> window_size, int64_t prefix_length,
                                            OptionalTensor key_lengths, OptionalTensor query_lengths, double softcap,
                                            OptionalTensor sinks, OptionalTensor alibi_slopes,
                                            OptionalTensor dropout_seed) {
    return attention_forward(
        backend, query, key, value,
        {attn_mask, dropout_p, is_causal, scale, enable_gqa, dropout_seed, causal_alignment, window_of(window_size),
         prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes, std::nullopt, std::nullopt});
  }

  static AttentionGradientTuple backward(const Tensor& grad_out, OptionalTensor grad_lse, const Tensor& query,
                                         const Tensor& key, const Tensor& value, OptionalTensor attn_mask,
                                         const Tensor& out, const Tensor& lse, double dropout_p, bool is_causal,
                                         std::optional<double> scale, bool enable_gqa, int64_t causal_alignment,
                                         std::vector<int64_t> window_size, int64_t prefix_length,
                                         OptionalTensor key_lengths, OptionalTensor query_lengths, double softcap,
                                         OptionalTensor sinks, OptionalTensor alibi_slopes, OptionalTensor dropout_seed,
                                         int64_t need) {
    return attention_backward(
        backend, grad_out, grad_lse, query, key, value,
        {attn_mask, dropout_p, is_causal, scale, enable_gqa, dropout_seed, causal_alignment, window_of(window_size),
         prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes, std::nullopt, std::nullopt},
        out, lse, need);
  }

  // Packed tensors (total, heads, dim) are seen as (heads, total, dim).
  static Tensor swapped(const Tensor& t) { return torch::stable::transpose(t, 0, 1); }

  static void check_packed_rank(const Tensor& query, const Tensor& key, const Tensor& value) {
    check_dim("query", query, 3);
    check_dim("key", key, 3);
    check_dim("value", value, 3);
  }

  // packed sequences have no mask, so no bit and no gradient of one
  static int64_t dense_need(int64_t need) {
    check_value(need >= 0 && need < 32, "need: expected a bit set from 0 to 31, got ", need);
    return (need & 7) | (need & 24) << 1;
  }
  using PackedGradientTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
  static PackedGradientTuple packed(const AttentionGradientTuple& dense) {
    const auto& [query, key, value, mask, sinks, slopes] = dense;
    const auto back = [](const Tensor& t) { return t.dim() == 3 ? swapped(t) : t; };
    return {back(query), back(key), back(value), sinks, slopes};
  }

  static std::tuple<Tensor, Tensor> varlen_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                                   const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                                   double dropout_p, bool is_causal, std::optional<double> scale,
                                                   int64_t causal_alignment, std::vector<int64_t> window_size,
                                                   int64_t prefix_length, double softcap, OptionalTensor sinks,
                                                   OptionalTensor alibi_slopes, OptionalTensor dropout_seed) {
    check_packed_rank(query, key, value);
    auto [out, lse] = attention_forward(
        backend, swapped(query), swapped(key), swapped(value),
        {std::nullopt, dropout_p, is_causal, scale, true, dropout_seed, causal_alignment, window_of(window_size),
         prefix_length, std::nullopt, std::nullopt, softcap, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k});
    return {swapped(out), lse};
  }

  static PackedGradientTuple varlen_backward(const Tensor& grad_out, OptionalTensor grad_lse, const Tensor& query,
                                             const Tensor& key, const Tensor& value, const Tensor& cu_seqlens_q,
                                             const Tensor& cu_seqlens_k, const Tensor& out, const Tensor& lse,
                                             double dropout_p, bool is_causal, std::optional<double> scale,
                                             int64_t causal_alignment, std::vector<int64_t> window_size,
                                             int64_t prefix_length, double softcap, OptionalTensor sinks,
                                             OptionalTensor alibi_slopes, OptionalTensor dropout_seed, int64_t need) {
    check_packed_rank(query, key, value);
    check_dim("grad_out", grad_out, 3);
    check_dim("out", out, 3);
    return packed(attention_backward(
        backend, swapped(grad_out), grad_lse, swapped(query), swapped(key), swapped(value),
        {std::nullopt, dropout_p, is_causal, scale, true, dropout_seed, causal_alignment, window_of(window_size),
         prefix_length, std::nullopt, std::nullopt, softcap, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_k},
        swapped(out), lse, dense_need(need)));
  }
};

}  // namespace attnjourney
