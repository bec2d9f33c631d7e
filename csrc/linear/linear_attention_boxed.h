// The operators of linear attention over one backend, as TORCH_BOX takes them.
#pragma once
#include "linear_attention.h"

namespace attnjourney {

template <const LinearBackend& Backend>
struct LinearOperators {
  static LinearResults forward(const Tensor& query, const Tensor& key, const Tensor& value,
                               OptionalTensor key_padding_mask, OptionalTensor initial_state,
                               OptionalTensor initial_normalizer, int64_t feature_map, bool is_causal, double scale,
                               bool normalize, double eps) {
    return linear_attention_forward(Backend, {query, key, value, key_padding_mask, initial_state, initial_normalizer,
                                              feature_map, is_causal, scale, normalize, eps});
  }

  static LinearGradients backward(const Tensor& grad_out, OptionalTensor grad_denominator, OptionalTensor grad_state,
                                  OptionalTensor grad_normalizer, const Tensor& query, const Tensor& key,
                                  const Tensor& value, OptionalTensor key_padding_mask, OptionalTensor initial_state,
                                  OptionalTensor initial_normalizer, const Tensor& out, const Tensor& denominator,
                                  int64_t feature_map, bool is_causal, double scale, bool normalize, double eps,
                                  int64_t need) {
    return linear_attention_backward(Backend,
                                     {query, key, value, key_padding_mask, initial_state, initial_normalizer,
                                      feature_map, is_causal, scale, normalize, eps},
                                     {grad_out, grad_denominator, grad_state, grad_normalizer, out, denominator}, need);
  }
};

}  // namespace attnjourney
