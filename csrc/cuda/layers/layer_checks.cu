// The layer operators of this library for tensors on the CPU, to be tested without a GPU: the checks of a CUDA call,
// then the CPU's operators in place of kernels. Tests give them their schemas, which are those of the layers.
#include <array>
#include <vector>

#include "cuda/attention/served.h"
#include "layer_operators.h"

namespace attnjourney {
namespace {

template <class... Args>
std::vector<StableIValue> cpu_operator(const char* name, size_t results, const Args&... args) {
  std::vector<StableIValue> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  stack.resize(results);
  return stack;
}
Tensor tensor(StableIValue v) { return torch::stable::detail::to<Tensor>(v); }
void copy(const Tensor& to, const Tensor& from) {
  Tensor target = to;
  torch::stable::copy_(target, from);
}

const std::vector<int64_t> no_window = {-1, -1};  // layers have none

void forward(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& o, Tensor& out,
             Tensor& lse) {
  check_served(check_attention(query, key, value, o), o, false);
  const auto results = cpu_operator("attnjourney::attention_forward", 2, query, key, value, o.attn_mask, o.dropout_p,
                                    o.is_causal, o.scale, o.enable_gqa, o.causal_alignment, no_window, o.prefix_length,
                                    o.key_lengths, o.query_lengths, o.softcap, o.sinks, o.alibi_slopes, o.dropout_seed);
  copy(out, tensor(results[0]));
  copy(lse, tensor(results[1]));
}

void backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
              const Tensor& value, const AttentionOptions& o, const Tensor& out, const Tensor& lse,
              AttentionGradients& gradients) {
  check_served(check_attention(query, key, value, o), o, true);
  const std::array<OptionalTensor*, 4> wanted = {&gradients.query, &gradients.key, &gradients.value,
                                                 &gradients.attn_mask};
  int64_t need = 0;
  for (size_t i = 0; i < wanted.size(); i++) need |= int64_t{wanted[i]->has_value()} << i;
  const auto results =
      cpu_operator("attnjourney::attention_backward", 6, grad_out, grad_lse, query, key, value, o.attn_mask, out, lse,
                   o.dropout_p, o.is_causal, o.scale, o.enable_gqa, o.causal_alignment, no_window, o.prefix_length,
                   o.key_lengths, o.query_lengths, o.softcap, o.sinks, o.alibi_slopes, o.dropout_seed, need);
  for (size_t i = 0; i < results.size(); i++) {
    const Tensor grad = tensor(results[i]);
    if (i >= wanted.size() || !*wanted[i]) continue;
    Tensor target = **wanted[i];
    const auto sizes = target.sizes();
    copy(target, aten::call("aten::sum_to_size", "", grad, std::vector<int64_t>(sizes.begin(), sizes.end())));
  }
}

void rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, RotaryLayout layout, RotaryDirection direction,
            const OptionalTensor& from) {
  const auto results = cpu_operator("attnjourney::rope", 1, from ? *from : x, cos, sin,
                                    layout == RotaryLayout::interleaved, direction == RotaryDirection::inverse);
  copy(x, tensor(results[0]));
}

// ---- RMS normalisation from ATen: rows (rows, width), a number a row as (rows, 1) ----

Tensor times(const Tensor& a, const Tensor& b) { return aten::call("aten::mul", "Tensor", a, b); }
Tensor wide(const Tensor& t, const Tensor& rstd) { return torch::stable::to(t, rstd.scalar_type()); }
Tensor column(const Tensor& rstd) { return torch::stable::view(rstd, {rstd.size(0), 1}); }
Tensor row_mean(const Tensor& x) {
  Tensor width = aten::empty(x, {1});
  torch::stable::fill_(width, static_cast<double>(x.size(1)));
  return aten::call("aten::div", "Tensor", aten::sum(x, {1}, true), width);
}

void rms_apply(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& y) {
  copy(y, times(times(wide(x, rstd), column(rstd)), wide(weight, rstd)));
}
void rms_forward(const Tensor& x, const Tensor& weight, double eps, const Tensor& y, const Tensor& rstd) {
  const Tensor v = wide(x, rstd), square = row_mean(times(v, v));
  Tensor one = aten::empty(v, {1});
  torch::stable::fill_(one, 1.0);
  copy(column(rstd), aten::call("aten::rsqrt", "", torch::stable::subtract(square, one, -eps)));
  rms_apply(x, weight, rstd, y);
}
void rms_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                  const OptionalTensor& grad_x, const OptionalTensor& grad_weight) {
  const Tensor r = column(rstd), g = wide(grad_y, rstd), normed = times(wide(x, rstd), r);
  if (grad_weight) copy(*grad_weight, aten::sum(times(g, normed), {0}));
  if (!grad_x) return;
  const Tensor scaled = times(g, wide(weight, rstd)), mean = row_mean(times(scaled, normed));
  copy(*grad_x, times(r, torch::stable::subtract(scaled, times(normed, mean), 1.0)));
}

constexpr AttentionBackend checked_attention{forward, backward};
constexpr RmsNormBackend aten_rms_norm{rms_forward, rms_apply, rms_backward};
constexpr GqaBackend checked_gqa{checked_attention, rotary};
constexpr MlaBackend checked_mla{checked_attention, rotary, aten_rms_norm};

}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  using namespace attnjourney;
  LayerOperators<checked_attention, checked_gqa, checked_mla>::register_in(m, "_cuda_");
}
