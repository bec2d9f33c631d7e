// The operators _attention_weights and _block_attention_weights as the dispatcher calls them, over what a device
// supplies: exp(score - lse) for chosen rows and heads.
#pragma once
#include "boxed.h"

namespace attnjourney {

// A checked call. query, key: rows dense; lse dense, (..., heads, q_len); rows, heads: int64, one dimension, whose
// numbers are for the device to check.
struct WeightsCall {
  const AttentionCall& call;
  const Tensor &query, &key, &lse, &rows, &heads;
  const AttentionOptions& options;
};
using WeightsFunction = void (*)(const WeightsCall&, Tensor& out);  // out: dense, (..., heads, rows, kv_len)

template <WeightsFunction write>
struct WeightsOperators {
  static void check_index(const char* name, const Tensor& t) {
    check_runtime(t.scalar_type() == ScalarType::Long, name, ": expected dtype torch.int64, got ",
                  dtype_text(t.scalar_type()));
    check_dim(name, t, 1);
  }

  static Tensor weights(const Tensor& query, const Tensor& key, const Tensor& lse, const Tensor& rows,
                        const Tensor& heads, const AttentionOptions& options) {
    const Tensor q = aten::rows_contiguous(query), k = aten::rows_contiguous(key);
    const AttentionCall c = check_attention(q, k, k, options);
    check_index("rows", rows);
    check_index("heads", heads);
    std::vector<int64_t> shape = c.leading();
    shape.push_back(c.params.q_len);
    bool fits = lse.dim() == static_cast<int64_t>(shape.size());
    for (size_t d = 0; fits && d < shape.size(); d++) fits = lse.size(static_cast<int64_t>(d)) == shape[d];
    check_value(fits, "lse: expected one number for each row of query, got shape ", shape_text(lse));
    check_runtime(lse.scalar_type() == c.lse_dtype, "lse: expected dtype ", dtype_text(c.lse_dtype), ", got ",
                  dtype_text(lse.scalar_type()));
    check_same_device("lse", lse, "query", query);
    shape.pop_back();
    if (c.rank >= 3) shape.back() = heads.size(0);
    shape.insert(shape.end(), {rows.size(0), c.params.kv_len});
    Tensor out = aten::empty(query, shape);
    const Tensor dense_lse = aten::contiguous(lse);
    write({c, q, k, dense_lse, rows, heads, options}, out);
    return out;
  }

  static AttentionOptions options_of(OptionalTensor attn_mask, bool is_causal, std::optional<double> scale,
                                     bool enable_gqa, int64_t causal_alignment, const std::vector<int64_t>& window_size,
                                     int64_t prefix_length, OptionalTensor key_lengths, OptionalTensor query_lengths,
                                     double softcap, OptionalTensor sinks, OptionalTensor alibi_slopes) {
    check_value(window_size.size() == 2, "window_size: expected two numbers (left, right), got ", window_size.size());
    return {attn_mask,
            0,
            is_causal,
            scale,
            enable_gqa,
            std::nullopt,
            causal_alignment,
            {window_size[0], window_size[1]},
            prefix_length,
            key_lengths,
            query_lengths,
            softcap,
            sinks,
            alibi_slopes,
            std::nullopt,
            std::nullopt};
  }

  static Tensor dense(const Tensor& query, const Tensor& key, const Tensor& lse, const Tensor& rows,
                      const Tensor& heads, OptionalTensor attn_mask, bool is_causal, std::optional<double> scale,
                      bool enable_gqa, int64_t causal_alignment, std::vector<int64_t> window_size,
                      int64_t prefix_length, OptionalTensor key_lengths, OptionalTensor query_lengths, double softcap,
                      OptionalTensor sinks, OptionalTensor alibi_slopes, OptionalTensor) {
    return weights(query, key, lse, rows, heads,
                   options_of(attn_mask, is_causal, scale, enable_gqa, causal_alignment, window_size, prefix_length,
                              key_lengths, query_lengths, softcap, sinks, alibi_slopes));
  }

  static Tensor blocks(const Tensor& query, const Tensor& key, const Tensor& lse, const Tensor& rows,
                       const Tensor& heads, const Tensor& block_offsets, const Tensor& block_index,
                       const Tensor& block_partial, const Tensor& block_elements, bool is_causal,
                       std::optional<double> scale, bool enable_gqa, int64_t causal_alignment,
                       std::vector<int64_t> window_size, int64_t prefix_length, OptionalTensor key_lengths,
                       OptionalTensor query_lengths, double softcap, OptionalTensor sinks, OptionalTensor alibi_slopes,
                       OptionalTensor) {
    AttentionOptions options = options_of(std::nullopt, is_causal, scale, enable_gqa, causal_alignment, window_size,
                                          prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes);
    options.blocks = BlockTensors{block_offsets, block_index, block_partial, block_elements};
    return weights(query, key, lse, rows, heads, options);
  }
};

}  // namespace attnjourney
