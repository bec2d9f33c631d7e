#include "gpt_attention.h"

#include "layers.h"

namespace attnjourney {
namespace {

struct Sizes {
  int64_t batch, seq, embed, heads, head_dim;
};

Sizes check(const Tensor& x, int64_t num_heads, const Tensor& qkv_weight, const Tensor& out_weight, double dropout_p) {
  layer::check_sequence("x", x);
  const int64_t embed = x.size(2);
  const int64_t head_dim = layer::check_heads("num_heads", num_heads, "x's last dimension", embed);
  layer::check_weight("qkv_weight", qkv_weight, 3 * embed, embed, "x", x);
  layer::check_weight("out_weight", out_weight, embed, embed, "x", x);
  check_dropout(dropout_p);
  return {x.size(0), x.size(1), embed, num_heads, head_dim};
}

// part 0, 1, 2: query, key, value, or their gradients, as (batch, heads, seq, head_dim)
Tensor heads(const Sizes& s, const Tensor& qkv_rows, int64_t part) {
  return layer::split_heads(qkv_rows, s.batch, s.seq, s.heads, s.head_dim, part * s.embed);
}
Tensor heads(const Sizes& s, const Tensor& rows) { return heads(s, rows, 0); }

AttentionOptions causal(double dropout_p, OptionalTensor dropout_seed) {
  AttentionOptions options;
  options.is_causal = true;
  options.dropout_p = dropout_p;
  options.dropout_seed = std::move(dropout_seed);
  return options;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> gpt_attention_forward(const AttentionBackend& backend, const Tensor& x,
                                                                 int64_t num_heads, const Tensor& qkv_weight,
                                                                 OptionalTensor qkv_bias, const Tensor& out_weight,
                                                                 OptionalTensor out_bias, double dropout_p,
                                                                 OptionalTensor dropout_seed) {
  const Sizes s = check(x, num_heads, qkv_weight, out_weight, dropout_p);
  layer::check_bias("qkv_bias", qkv_bias, 3 * s.embed, "x", x);
  layer::check_bias("out_bias", out_bias, s.embed, "x", x);
  const AttentionOptions options = causal(dropout_p, std::move(dropout_seed));

  const Tensor qkv = layer::linear(layer::rows(x), qkv_weight, qkv_bias);  // (batch * seq, 3 * embed)
  const Tensor attn = layer::empty_rows(x, s.batch * s.seq, s.embed);
  Tensor attn_heads = heads(s, attn);
  Tensor lse = aten::empty(x, {s.batch, s.heads, s.seq}, layer::lse_dtype(x));
  backend.forward(heads(s, qkv, 0), heads(s, qkv, 1), heads(s, qkv, 2), options, attn_heads, lse);
  const Tensor out = layer::linear(attn, out_weight, out_bias);

  const auto sequence = [&](const Tensor& rows) { return layer::sequence(rows, s.batch, s.seq); };
  return {sequence(out), sequence(attn), lse, sequence(qkv)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gpt_attention_backward(
    const AttentionBackend& backend, const Tensor& grad_out, const Tensor& x, int64_t num_heads,
    const Tensor& qkv_weight, const Tensor& out_weight, const Tensor& attn, const Tensor& lse, const Tensor& qkv,
    double dropout_p, OptionalTensor dropout_seed, int64_t need) {
  const Sizes s = check(x, num_heads, qkv_weight, out_weight, dropout_p);
  layer::check_saved("grad_out", grad_out, {s.batch, s.seq, s.embed}, x);
  layer::check_saved("attn", attn, {s.batch, s.seq, s.embed}, x);
  layer::check_saved("lse", lse, {s.batch, s.heads, s.seq}, x, layer::lse_dtype(x));
  layer::check_saved("qkv", qkv, {s.batch, s.seq, 3 * s.embed}, x);
  const bool need_x = need & 1, need_qkv_weight = need & 2, need_qkv_bias = need & 4, need_out_weight = need & 8,
             need_out_bias = need & 16;
  OptionalTensor grad_x, grad_qkv_weight, grad_qkv_bias, grad_out_weight, grad_out_bias;

  const Tensor grad_rows = layer::rows(grad_out), attn_rows = layer::rows(attn);
  if (need_out_weight) grad_out_weight = layer::weight_grad(grad_rows, attn_rows);
  if (need_out_bias) grad_out_bias = layer::bias_grad(grad_rows);

  if (need_x || need_qkv_weight || need_qkv_bias) {
    const Tensor qkv_rows = layer::rows(qkv), grad_qkv = layer::empty_rows(x, s.batch * s.seq, 3 * s.embed);
    AttentionGradients gradients;
    gradients.query = heads(s, grad_qkv, 0);
    gradients.key = heads(s, grad_qkv, 1);
    gradients.value = heads(s, grad_qkv, 2);
    backend.backward(heads(s, layer::input_grad(grad_rows, out_weight)), std::nullopt, heads(s, qkv_rows, 0),
                     heads(s, qkv_rows, 1), heads(s, qkv_rows, 2), causal(dropout_p, std::move(dropout_seed)),
                     heads(s, attn_rows), lse, gradients);
    if (need_x) grad_x = layer::sequence(layer::input_grad(grad_qkv, qkv_weight), s.batch, s.seq);
    if (need_qkv_weight) grad_qkv_weight = layer::weight_grad(grad_qkv, layer::rows(x));
    if (need_qkv_bias) grad_qkv_bias = layer::bias_grad(grad_qkv);
  }
  return {layer::or_none(grad_x, x), layer::or_none(grad_qkv_weight, x), layer::or_none(grad_qkv_bias, x),
          layer::or_none(grad_out_weight, x), layer::or_none(grad_out_bias, x)};
}

}  // namespace attnjourney

// A gradient not needed comes back with shape (0,).
STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def(
      "gpt_attention(Tensor x, int num_heads, Tensor qkv_weight, Tensor? qkv_bias, Tensor out_weight, "
      "Tensor? out_bias, *, float dropout_p=0.0) -> Tensor");
  m.def(
      "gpt_attention_forward(Tensor x, int num_heads, Tensor qkv_weight, Tensor? qkv_bias, Tensor out_weight, "
      "Tensor? out_bias, *, float dropout_p=0.0, Tensor? dropout_seed=None) "
      "-> (Tensor out, Tensor attn, Tensor lse, Tensor qkv)");
  m.def(
      "gpt_attention_backward(Tensor grad_out, Tensor x, int num_heads, Tensor qkv_weight, Tensor out_weight, "
      "Tensor attn, Tensor lse, Tensor qkv, *, float dropout_p=0.0, Tensor? dropout_seed=None, int need=31) "
      "-> (Tensor grad_x, Tensor grad_qkv_weight, Tensor grad_qkv_bias, Tensor grad_out_weight, Tensor grad_out_bias)");
}
