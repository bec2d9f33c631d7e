// The operators gqa_forward and gqa_backward of one device, from their flat argument lists.
#pragma once
#include <tuple>

#include "gqa.h"

namespace attnjourney {

template <const GqaBackend& backend>
struct GqaOperators {
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
      const Tensor& x, int64_t num_heads, int64_t num_kv_heads, const Tensor& q_weight, const Tensor& k_weight,
      const Tensor& v_weight, const Tensor& o_weight, OptionalTensor q_bias, OptionalTensor k_bias,
      OptionalTensor v_bias, OptionalTensor o_bias, OptionalTensor cos, OptionalTensor sin, bool is_causal) {
    GqaSaved s;
    const Tensor out = gqa_forward(backend,
                                   {x, num_heads, num_kv_heads, q_weight, k_weight, v_weight, o_weight, q_bias, k_bias,
                                    v_bias, o_bias, cos, sin, is_causal},
                                   s);
    return {out, s.query, s.key, s.value, s.attn, s.lse};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
      const Tensor& grad_out, const Tensor& x, int64_t num_heads, int64_t num_kv_heads, const Tensor& q_weight,
      const Tensor& k_weight, const Tensor& v_weight, const Tensor& o_weight, const Tensor& query, const Tensor& key,
      const Tensor& value, const Tensor& attn, const Tensor& lse, OptionalTensor cos, OptionalTensor sin,
      bool is_causal, int64_t need) {
    const GqaGradients g = gqa_backward(
        backend, grad_out,
        {x, num_heads, num_kv_heads, q_weight, k_weight, v_weight, o_weight, {}, {}, {}, {}, cos, sin, is_causal},
        {query, key, value, attn, lse}, need);
    return {g.x, g.q_weight, g.k_weight, g.v_weight, g.o_weight, g.q_bias, g.k_bias, g.v_bias, g.o_bias};
  }
};

}  // namespace attnjourney
