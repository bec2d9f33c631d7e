// The operators mla_forward and mla_backward of one device, from their flat argument lists.
#pragma once
#include <tuple>

#include "mla.h"

namespace attnjourney {

template <const MlaBackend& backend>
struct MlaOperators {
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward(
      const Tensor& x, int64_t num_heads, int64_t qk_nope_head_dim, int64_t qk_rope_head_dim, int64_t v_head_dim,
      OptionalTensor q_a_weight, OptionalTensor q_a_norm_weight, const Tensor& q_b_weight, const Tensor& kv_a_weight,
      const Tensor& kv_a_norm_weight, const Tensor& kv_b_weight, const Tensor& o_weight, OptionalTensor cos,
      OptionalTensor sin, bool is_causal, std::optional<double> scale, double eps) {
    MlaSaved s;
    const Tensor out =
        mla_forward(backend,
                    {x, num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_a_weight, q_a_norm_weight,
                     q_b_weight, kv_a_weight, kv_a_norm_weight, kv_b_weight, o_weight, cos, sin, is_causal, scale, eps},
                    s);
    return {out, s.query, s.kv, s.kv_a, s.kv_rstd, s.q_a, s.q_rstd, s.attn, s.lse};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
      const Tensor& grad_out, const Tensor& x, int64_t num_heads, int64_t qk_nope_head_dim, int64_t qk_rope_head_dim,
      int64_t v_head_dim, OptionalTensor q_a_weight, OptionalTensor q_a_norm_weight, const Tensor& q_b_weight,
      const Tensor& kv_a_weight, const Tensor& kv_a_norm_weight, const Tensor& kv_b_weight, const Tensor& o_weight,
      const Tensor& query, const Tensor& kv, const Tensor& kv_a, const Tensor& kv_rstd, const Tensor& q_a,
      const Tensor& q_rstd, const Tensor& attn, const Tensor& lse, OptionalTensor cos, OptionalTensor sin,
      bool is_causal, std::optional<double> scale, int64_t need) {
    const double eps = 0;  // it is in rstd
    const MlaGradients g = mla_backward(
        backend, grad_out,
        {x, num_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_a_weight, q_a_norm_weight, q_b_weight,
         kv_a_weight, kv_a_norm_weight, kv_b_weight, o_weight, cos, sin, is_causal, scale, eps},
        {query, kv, kv_a, kv_rstd, q_a, q_rstd, attn, lse}, need);
    return {g.x,           g.q_a_weight,       g.q_a_norm_weight, g.q_b_weight,
            g.kv_a_weight, g.kv_a_norm_weight, g.kv_b_weight,     g.o_weight};
  }
};

}  // namespace attnjourney
