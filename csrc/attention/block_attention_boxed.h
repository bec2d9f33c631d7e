// The operators of attention under a mask of blocks as the dispatcher calls them; see attention/boxed.h.
#pragma once
#include "boxed.h"

namespace attnjourney {

template <const AttentionBackend& backend>
struct BlockAttentionOperators {
  using Base = AttentionOperators<backend>;

  // without the mask's: there is none that could have a gradient
  using GradientTuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
  static GradientTuple without_mask(const AttentionGradientTuple& dense) {
    const auto& [query, key, value, mask, sinks, slopes] = dense;
    return {query, key, value, sinks, slopes};
  }

  static std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const Tensor& block_offsets, const Tensor& block_index,
                                            const Tensor& block_partial, const Tensor& block_elements, double dropout_p,
                                            bool is_causal, std::optional<double> scale, bool enable_gqa,
                                            int64_t causal_alignment, std::vector<int64_t> window_size,
                                            int64_t prefix_length, OptionalTensor key_lengths,
                                            OptionalTensor query_lengths, double softcap, OptionalTensor sinks,
                                            OptionalTensor alibi_slopes, OptionalTensor dropout_seed) {
    return attention_forward(
        backend, query, key, value,
        {std::nullopt, dropout_p, is_causal, scale, enable_gqa, dropout_seed, causal_alignment,
         Base::window_of(window_size), prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes,
         std::nullopt, std::nullopt, BlockTensors{block_offsets, block_index, block_partial, block_elements}});
  }

  static GradientTuple backward(const Tensor& grad_out, OptionalTensor grad_lse, const Tensor& query, const Tensor& key,
                                const Tensor& value, const Tensor& block_offsets, const Tensor& block_index,
                                const Tensor& block_partial, const Tensor& block_elements, const Tensor& out,
                                const Tensor& lse, double dropout_p, bool is_causal, std::optional<double> scale,
                                bool enable_gqa, int64_t causal_alignment, std::vector<int64_t> window_size,
                                int64_t prefix_length, OptionalTensor key_lengths, OptionalTensor query_lengths,
                                double softcap, OptionalTensor sinks, OptionalTensor alibi_slopes,
                                OptionalTensor dropout_seed, int64_t need) {
    return without_mask(attention_backward(
        backend, grad_out, grad_lse, query, key, value,
        {std::nullopt, dropout_p, is_causal, scale, enable_gqa, dropout_seed, causal_alignment,
         Base::window_of(window_size), prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes,
         std::nullopt, std::nullopt, BlockTensors{block_offsets, block_index, block_partial, block_elements}},
        out, lse, Base::dense_need(need)));
  }

  static std::tuple<Tensor, Tensor> jvp(
      const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_offsets,
      const Tensor& block_index, const Tensor& block_partial, const Tensor& block_elements, const Tensor& out,
      const Tensor& lse, OptionalTensor query_tangent, OptionalTensor key_tangent, OptionalTensor value_tangent,
      OptionalTensor sinks_tangent, OptionalTensor alibi_slopes_tangent, double dropout_p, bool is_causal,
      std::optional<double> scale, bool enable_gqa, int64_t causal_alignment, std::vector<int64_t> window_size,
      int64_t prefix_length, OptionalTensor key_lengths, OptionalTensor query_lengths, double softcap,
      OptionalTensor sinks, OptionalTensor alibi_slopes, OptionalTensor dropout_seed) {
    return attention_jvp(
        backend, query, key, value,
        {std::nullopt, dropout_p, is_causal, scale, enable_gqa, dropout_seed, causal_alignment,
         Base::window_of(window_size), prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes,
         std::nullopt, std::nullopt, BlockTensors{block_offsets, block_index, block_partial, block_elements}},
        out, lse,
        {query_tangent, key_tangent, value_tangent, std::nullopt, sinks_tangent, alibi_slopes_tangent, std::nullopt,
         std::nullopt, std::nullopt, std::nullopt});
  }

  static GradientTuple backward_jvp(
      const Tensor& grad_out, OptionalTensor grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
      const Tensor& block_offsets, const Tensor& block_index, const Tensor& block_partial, const Tensor& block_elements,
      const Tensor& out, const Tensor& lse, const Tensor& out_tangent, const Tensor& lse_tangent,
      OptionalTensor grad_out_tangent, OptionalTensor grad_lse_tangent, OptionalTensor query_tangent,
      OptionalTensor key_tangent, OptionalTensor value_tangent, OptionalTensor sinks_tangent,
      OptionalTensor alibi_slopes_tangent, double dropout_p, bool is_causal, std::optional<double> scale,
      bool enable_gqa, int64_t causal_alignment, std::vector<int64_t> window_size, int64_t prefix_length,
      OptionalTensor key_lengths, OptionalTensor query_lengths, double softcap, OptionalTensor sinks,
      OptionalTensor alibi_slopes, OptionalTensor dropout_seed, int64_t need) {
    const AttentionTangents tangents{query_tangent, key_tangent,          value_tangent,    std::nullopt,
                                     sinks_tangent, alibi_slopes_tangent, grad_out_tangent, grad_lse_tangent,
                                     out_tangent,   lse_tangent};
    return without_mask(attention_backward(
        backend, grad_out, grad_lse, query, key, value,
        {std::nullopt, dropout_p, is_causal, scale, enable_gqa, dropout_seed, causal_alignment,
         Base::window_of(window_size), prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes,
         std::nullopt, std::nullopt, BlockTensors{block_offsets, block_index, block_partial, block_elements}},
        out, lse, Base::dense_need(need), &tangents));
  }
};

}  // namespace attnjourney
