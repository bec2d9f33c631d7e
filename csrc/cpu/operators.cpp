// CPU registration of the attention operators.
#include "../attention_operators.h"

namespace attnjourney {
namespace {

std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   OptionalTensor attn_mask, double dropout_p, bool is_causal,
                                   std::optional<double> scale, bool enable_gqa, OptionalTensor dropout_seed) {
  return attention_forward(cpu_attention, query, key, value,
                           {std::move(attn_mask), dropout_p, is_causal, scale, enable_gqa, std::move(dropout_seed)});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor& grad_out, OptionalTensor grad_lse,
                                                    const Tensor& query, const Tensor& key, const Tensor& value,
                                                    OptionalTensor attn_mask, const Tensor& out, const Tensor& lse,
                                                    double dropout_p, bool is_causal, std::optional<double> scale,
                                                    bool enable_gqa, OptionalTensor dropout_seed, int64_t need) {
  return attention_backward(cpu_attention, grad_out, grad_lse, query, key, value,
                            {std::move(attn_mask), dropout_p, is_causal, scale, enable_gqa, std::move(dropout_seed)},
                            out, lse, need);
}

}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&attnjourney::forward));
  m.impl("attention_backward", TORCH_BOX(&attnjourney::backward));
}
