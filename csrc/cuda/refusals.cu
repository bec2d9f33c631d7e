// This library's operators for tensors on the CPU, so that they are tested without a GPU: the checks of a CUDA call,
// then the CPU's operators in place of kernels. Tests give them their schemas, which are those of the operators.
#include "refusals.h"

#include <array>

#include "decode/mla_decode_cuda.h"
#include "registration.h"

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

// ---- attention: packed sequences and masks of blocks are checked alone ----

bool is_checked_alone(const AttentionOptions& o) { return o.blocks || o.cu_seqlens_q; }
std::vector<int64_t> window_of(const AttentionOptions& o) { return {o.window[0], o.window[1]}; }
std::vector<int64_t> numbers_of(const Origin& o) { return {o.row, o.key, o.head, o.heads}; }

void fp8_on_cpu(const AttentionCall& c, const AttentionResults& to) {
  const auto& [query, key, value, o, fp8] = c.args;
  const int64_t out_dtype = c.dtype == ScalarType::BFloat16 ? 0 : c.dtype == ScalarType::Half ? 1 : 2;
  const auto results = cpu_operator("attnjourney::attention_fp8", 2, query, key, value, fp8->query, fp8->key,
                                    fp8->value, o.is_causal, o.scale, o.enable_gqa, o.causal_alignment, window_of(o),
                                    o.prefix_length, o.key_lengths, o.softcap, o.sinks, out_dtype);
  copy(to.out, tensor(results[0]));
  copy(to.lse, tensor(results[1]));
}

void checked_forward(AttentionCall& c, const AttentionResults& to) {
  check_served(c, most_head_dim(c));
  const auto& [query, key, value, o, fp8] = c.args;
  if (is_checked_alone(o)) return;
  if (fp8) return fp8_on_cpu(c, to);
  const auto results =
      cpu_operator("attnjourney::attention_forward", 3, query, key, value, o.attn_mask, o.dropout_p, o.is_causal,
                   o.scale, o.enable_gqa, o.causal_alignment, window_of(o), o.prefix_length, o.key_lengths,
                   o.query_lengths, o.softcap, o.sinks, o.alibi_slopes, numbers_of(o.origin), o.dropout_seed);
  copy(to.out, tensor(results[0]));
  copy(to.lse, tensor(results[1]));
  copy(to.stats, tensor(results[2]));
}

// results: of a CPU operator that gives all gradients in the shapes of what they belong to
void copy_gradients(const std::vector<StableIValue>& results, const AttentionGradients& to) {
  const auto wanted = to.all();
  for (size_t i = 0; i < results.size(); i++) {
    const Tensor grad = tensor(results[i]);
    if (!*wanted[i]) continue;
    const Tensor target = **wanted[i];
    const auto sizes = target.sizes();
    copy(target, aten::call("aten::sum_to_size", "", grad, std::vector<int64_t>(sizes.begin(), sizes.end())));
  }
}
int64_t need_of(const AttentionGradients& gradients) {
  const auto wanted = gradients.all();
  int64_t need = 0;
  for (size_t i = 0; i < wanted.size(); i++) need |= int64_t{wanted[i]->has_value()} << i;
  return need;
}

void checked_backward(AttentionCall& c, const AttentionSaved& saved, const AttentionGradients& gradients) {
  check_served(c, most_head_dim(c));
  const auto& [query, key, value, o, fp8] = c.args;
  if (is_checked_alone(o)) return;
  copy_gradients(
      cpu_operator("attnjourney::attention_backward", 6, saved.grad_out, saved.grad_lse, query, key, value, o.attn_mask,
                   saved.out, saved.lse, saved.stats, o.dropout_p, o.is_causal, o.scale, o.enable_gqa,
                   o.causal_alignment, window_of(o), o.prefix_length, o.key_lengths, o.query_lengths, o.softcap,
                   o.sinks, o.alibi_slopes, numbers_of(o.origin), o.dropout_seed, need_of(gradients)),
      gradients);
}

void checked_jvp(AttentionCall& c, const AttentionResults& results, const AttentionTangents& tangents) {
  check_served(c, most_tangent_dim);
  const auto& [query, key, value, o, fp8] = c.args;
  if (is_checked_alone(o)) return;
  const auto changes = cpu_operator(
      "attnjourney::attention_jvp", 2, query, key, value, o.attn_mask, results.out, results.lse, results.stats,
      tangents.query, tangents.key, tangents.value, tangents.attn_mask, tangents.sinks, tangents.alibi_slopes,
      o.dropout_p, o.is_causal, o.scale, o.enable_gqa, o.causal_alignment, window_of(o), o.prefix_length, o.key_lengths,
      o.query_lengths, o.softcap, o.sinks, o.alibi_slopes, numbers_of(o.origin), o.dropout_seed);
  copy(*tangents.out, tensor(changes[0]));
  copy(*tangents.lse, tensor(changes[1]));
}

void checked_backward_jvp(AttentionCall& c, const AttentionSaved& saved, const AttentionTangents& t,
                          const AttentionGradients& gradients) {
  check_served(c, most_tangent_dim);
  const auto& [query, key, value, o, fp8] = c.args;
  if (is_checked_alone(o)) return;
  copy_gradients(
      cpu_operator("attnjourney::attention_backward_jvp", 6, saved.grad_out, saved.grad_lse, query, key, value,
                   o.attn_mask, saved.out, saved.lse, saved.stats, *t.out, *t.lse, t.grad_out, t.grad_lse, t.query,
                   t.key, t.value, t.attn_mask, t.sinks, t.alibi_slopes, o.dropout_p, o.is_causal, o.scale,
                   o.enable_gqa, o.causal_alignment, window_of(o), o.prefix_length, o.key_lengths, o.query_lengths,
                   o.softcap, o.sinks, o.alibi_slopes, numbers_of(o.origin), o.dropout_seed, need_of(gradients)),
      gradients);
}

// ---- decoding ----

// CUDA looks at no lengths, blocks and columns of a mask, which the CPU may refuse: such calls are checked alone.
bool runs_on_cpu(const DecodeCall& c, const DecodeInputs& in) {
  try {
    check_decode_values(c, in);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void decode_on_cpu(const DecodeCall& c, const DecodeInputs& in, const Tensor& out, const Tensor& lse) {
  if (!runs_on_cpu(c, in)) return;
  const AttentionOptions& o = in.options;
  const auto results =
      cpu_operator("attnjourney::decode", 2, in.query, in.key, in.value, in.lengths, in.block_table, in.ring,
                   in.key_scale, in.value_scale, o.is_causal, window_of(o), std::optional<double>(c.scale), o.attn_mask,
                   o.prefix_length, o.softcap, o.sinks, o.alibi_slopes);
  copy(out, tensor(results[0]));
  copy(lse, tensor(results[1]));
}

void checked_decode(const DecodeCall& c, const DecodeInputs& in, const Tensor& out, const Tensor& lse) {
  check_decode_served(c, in);
  decode_on_cpu(c, in, out, lse);
}
void checked_decode_latents(const DecodeCall& c, const DecodeInputs& in, const Tensor& out, const Tensor& lse) {
  check_latent_served(c, in);
  decode_on_cpu(c, in, out, lse);
}

// ---- linear attention, gated or not: checked alone ----

void linear_forward(const LinearCall& c, const LinearInputs&, const Tensor&, const Tensor&, const Tensor&,
                    const Tensor&) {
  check_linear_served(c);
}
void linear_backward(const LinearCall& c, const LinearInputs&, const LinearGradientInputs&, const LinearGradients&) {
  check_linear_served(c);
}
void gated_forward(const GatedCall& c, const GatedInputs&, const Tensor&, const Tensor&) { check_gated_served(c); }
void gated_backward(const GatedCall& c, const GatedInputs&, const Tensor&, const OptionalTensor&,
                    const GatedGradients&) {
  check_gated_served(c);
}

void sparse_forward(const SparseCall& c, const SparseInputs& in, const SparseResults&) { check_sparse_served(c, in); }
void sparse_backward(const SparseCall& c, const SparseInputs& in, const SparseSaved&, const SparseGradients&) {
  check_sparse_served(c, in);
}

void indexer_topk(const IndexerCall& c, const IndexerInputs&, const OptionalTensor&, const IndexerResults&) {
  check_indexer_served(c, c.params.topk);
}
void indexer_loss(const IndexerCall& c, const IndexerInputs&, const IndexerTarget& target, const Tensor&,
                  const Tensor&) {
  check_indexer_served(c, target.indices.size(2));
  check_target_served(target);
}
void indexer_loss_backward(const IndexerCall& c, const IndexerInputs&, const Tensor& indices, const Tensor&,
                           const Tensor&, const IndexerGradients&) {
  check_indexer_served(c, indices.size(2));
}

void rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, RotaryLayout layout, RotaryDirection direction,
            const OptionalTensor& from) {
  const auto results = cpu_operator("attnjourney::rope", 1, from ? *from : x, cos, sin,
                                    layout == RotaryLayout::interleaved, direction == RotaryDirection::inverse);
  copy(x, tensor(results[0]));
}

// ---- RMS normalisation from ATen: rows (rows, width), a number a row as (rows, 1) ----

Tensor times(const Tensor& a, const Tensor& b) { return aten::call("aten::mul", "Tensor", a, b); }
Tensor as_rstd(const Tensor& t, const Tensor& rstd) { return torch::stable::to(t, rstd.scalar_type()); }
Tensor column(const Tensor& rstd) { return torch::stable::view(rstd, {rstd.size(0), 1}); }
Tensor row_mean(const Tensor& x) {
  Tensor width = aten::empty(x, {1});
  torch::stable::fill_(width, static_cast<double>(x.size(1)));
  return aten::call("aten::div", "Tensor", aten::sum(x, {1}, true), width);
}

void rms_apply(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& y) {
  copy(y, times(times(as_rstd(x, rstd), column(rstd)), as_rstd(weight, rstd)));
}
void rms_forward(const Tensor& x, const Tensor& weight, double eps, const Tensor& y, const Tensor& rstd) {
  const Tensor v = as_rstd(x, rstd), square = row_mean(times(v, v));
  Tensor one = aten::empty(v, {1});
  torch::stable::fill_(one, 1.0);
  copy(column(rstd), aten::call("aten::rsqrt", "", torch::stable::subtract(square, one, -eps)));
  rms_apply(x, weight, rstd, y);
}
void rms_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                  const OptionalTensor& grad_x, const OptionalTensor& grad_weight) {
  const Tensor r = column(rstd), g = as_rstd(grad_y, rstd), normed = times(as_rstd(x, rstd), r);
  if (grad_weight) copy(*grad_weight, aten::sum(times(g, normed), {0}));
  if (!grad_x) return;
  const Tensor scaled = times(g, as_rstd(weight, rstd)), mean = row_mean(times(scaled, normed));
  copy(*grad_x, times(r, torch::stable::subtract(scaled, times(normed, mean), 1.0)));
}

}  // namespace

constexpr Backend refusing_backend{
    .attention = {.forward = checked_forward,
                  .backward = checked_backward,
                  .jvp = checked_jvp,
                  .backward_jvp = checked_backward_jvp},
    .decode = {.decode = checked_decode,
               .decode_latents = checked_decode_latents,
               .products = aten_head_products,
               .most_head_dim = most_decode_dim},
    .caches = {},
    .linear = {.forward = linear_forward, .backward = linear_backward},
    .gated = {.forward = gated_forward, .backward = gated_backward},
    .sparse = {.forward = sparse_forward, .backward = sparse_backward},
    .indexer = {.topk = indexer_topk, .loss = indexer_loss, .loss_backward = indexer_loss_backward},
    .rotary = rotary,
    .rms_norm = {.forward = rms_forward, .apply = rms_apply, .backward = rms_backward},
};

}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  attnjourney::register_operators<attnjourney::refusing_backend>(m, "_cuda_");
}
