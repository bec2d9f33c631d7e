#include "gpt_attention.h"

#include "core/backend.h"
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

AttentionArgs inputs(const Sizes& s, const Tensor& qkv_rows, double dropout_p, const OptionalTensor& dropout_seed) {
  AttentionArgs args{
      .query = heads(s, qkv_rows, 0), .key = heads(s, qkv_rows, 1), .value = heads(s, qkv_rows, 2), .options = {}};
  args.options.is_causal = true;
  args.options.dropout_p = dropout_p;
  args.options.dropout_seed = dropout_seed;
  return args;
}

}  // namespace

std::vector<Tensor> gpt_attention_forward(const Backend& backend, Arguments& in) {
  const Tensor x = in.tensor();
  const int64_t num_heads = in.integer();
  const Tensor qkv_weight = in.tensor();
  const OptionalTensor qkv_bias = in.optional_tensor();
  const Tensor out_weight = in.tensor();
  const OptionalTensor out_bias = in.optional_tensor();
  const double dropout_p = in.number();
  const OptionalTensor dropout_seed = in.optional_tensor();
  const Sizes s = check(x, num_heads, qkv_weight, out_weight, dropout_p);
  layer::check_bias("qkv_bias", qkv_bias, 3 * s.embed, "x", x);
  layer::check_bias("out_bias", out_bias, s.embed, "x", x);

  const Tensor qkv = layer::linear(layer::rows(x), qkv_weight, qkv_bias);  // (batch * seq, 3 * embed)
  const Tensor attn = layer::empty_rows(x, s.batch * s.seq, s.embed);
  const Tensor lse = aten::empty(x, {s.batch, s.heads, s.seq}, layer::lse_dtype(x)),
               stats = aten::empty(x, {s.batch, s.heads, s.seq, 2}, layer::lse_dtype(x));
  AttentionCall call = check_attention(inputs(s, qkv, dropout_p, dropout_seed));
  backend.attention.forward(call, {.out = heads(s, attn), .lse = lse, .stats = stats});
  const Tensor out = layer::linear(attn, out_weight, out_bias);

  const auto sequence = [&](const Tensor& rows) { return layer::sequence(rows, s.batch, s.seq); };
  return {sequence(out), sequence(attn), lse, stats, sequence(qkv)};
}

std::vector<Tensor> gpt_attention_backward(const Backend& backend, Arguments& in) {
  const Tensor grad_out = in.tensor(), x = in.tensor();
  const int64_t num_heads = in.integer();
  const Tensor qkv_weight = in.tensor(), out_weight = in.tensor();
  const Tensor attn = in.tensor(), lse = in.tensor(), stats = in.tensor(), qkv = in.tensor();
  const double dropout_p = in.number();
  const OptionalTensor dropout_seed = in.optional_tensor();
  const int64_t need = in.integer();
  const Sizes s = check(x, num_heads, qkv_weight, out_weight, dropout_p);
  layer::check_saved("grad_out", grad_out, {s.batch, s.seq, s.embed}, x);
  layer::check_saved("attn", attn, {s.batch, s.seq, s.embed}, x);
  layer::check_saved("lse", lse, {s.batch, s.heads, s.seq}, x, layer::lse_dtype(x));
  layer::check_saved("stats", stats, {s.batch, s.heads, s.seq, 2}, x, layer::lse_dtype(x));
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
    AttentionCall call = check_attention(inputs(s, qkv_rows, dropout_p, dropout_seed));
    backend.attention.backward(call,
                               {.grad_out = heads(s, layer::input_grad(grad_rows, out_weight)),
                                .grad_lse = std::nullopt,
                                .out = heads(s, attn_rows),
                                .lse = aten::contiguous(lse),
                                .stats = aten::contiguous(stats)},
                               gradients);
    if (need_x) grad_x = layer::sequence(layer::input_grad(grad_qkv, qkv_weight), s.batch, s.seq);
    if (need_qkv_weight) grad_qkv_weight = layer::weight_grad(grad_qkv, layer::rows(x));
    if (need_qkv_bias) grad_qkv_bias = layer::bias_grad(grad_qkv);
  }
  return {layer::or_none(grad_x, x), layer::or_none(grad_qkv_weight, x), layer::or_none(grad_qkv_bias, x),
          layer::or_none(grad_out_weight, x), layer::or_none(grad_out_bias, x)};
}

}  // namespace attnjourney
