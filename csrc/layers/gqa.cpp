#include "gqa.h"

#include "layers.h"

namespace attnjourney {
namespace {

struct GqaShape {
  int64_t batch, seq, embed, heads, kv_heads, head_dim, v_head_dim, out_embed, rotary_dim;
};

GqaShape check_gqa(const GqaInputs& in) {
  GqaShape s{};
  layer::check_sequence("x", in.x);
  s.batch = in.x.size(0), s.seq = in.x.size(1), s.embed = in.x.size(2);
  s.heads = in.heads, s.kv_heads = in.kv_heads;
  check_value(s.heads > 0, "num_heads: expected a positive number, got ", s.heads);
  layer::check_heads("num_kv_heads", s.kv_heads, "num_heads", s.heads);

  check_dim("q_weight", in.q_weight, 2);
  check_dim("v_weight", in.v_weight, 2);
  check_dim("o_weight", in.o_weight, 2);
  s.head_dim = layer::check_heads("num_heads", s.heads, "the rows of q_weight", in.q_weight.size(0));
  s.v_head_dim = layer::check_heads("num_kv_heads", s.kv_heads, "the rows of v_weight", in.v_weight.size(0));
  s.out_embed = in.o_weight.size(0);
  check_value(s.head_dim > 0, "q_weight: expected at least one row per head, got shape ", shape_text(in.q_weight));
  check_value(s.v_head_dim > 0, "v_weight: expected at least one row per head, got shape ", shape_text(in.v_weight));
  layer::check_weight("q_weight", in.q_weight, s.heads * s.head_dim, s.embed, "x", in.x);
  layer::check_weight("k_weight", in.k_weight, s.kv_heads * s.head_dim, s.embed, "x", in.x);
  layer::check_weight("v_weight", in.v_weight, s.kv_heads * s.v_head_dim, s.embed, "x", in.x);
  layer::check_weight("o_weight", in.o_weight, s.out_embed, s.heads * s.v_head_dim, "x", in.x);
  layer::check_bias("q_bias", in.q_bias, s.heads * s.head_dim, "x", in.x);
  layer::check_bias("k_bias", in.k_bias, s.kv_heads * s.head_dim, "x", in.x);
  layer::check_bias("v_bias", in.v_bias, s.kv_heads * s.v_head_dim, "x", in.x);
  layer::check_bias("o_bias", in.o_bias, s.out_embed, "x", in.x);

  s.rotary_dim = check_rotary(in.cos, in.sin, s.batch, s.seq, "x", in.x);
  check_value(s.rotary_dim <= s.head_dim, "cos: expected at most head_dim / 2 columns, head_dim is ", s.head_dim,
              ", got shape ", shape_text(in.cos ? *in.cos : in.x));
  return s;
}

// rows (batch * seq, heads * head_dim) as (batch, heads, seq, head_dim)
Tensor qk_heads(const GqaShape& s, const Tensor& rows, int64_t heads) {
  return layer::split_heads(rows, s.batch, s.seq, heads, s.head_dim);
}
Tensor v_heads(const GqaShape& s, const Tensor& rows, int64_t heads) {
  return layer::split_heads(rows, s.batch, s.seq, heads, s.v_head_dim);
}
Tensor empty_as(const Tensor& rows) { return layer::empty_rows(rows, rows.size(0), rows.size(1)); }

// turns the first rotary_dim numbers of every head of rows (batch * seq, heads * head_dim)
void rotate(const GqaBackend& backend, const GqaInputs& in, const GqaShape& s, const Tensor& rows, int64_t heads,
            RotaryDirection direction) {
  if (s.rotary_dim == 0) return;
  const Tensor x = layer::split_heads(rows, s.batch, s.seq, heads, s.rotary_dim, 0, s.head_dim);
  backend.rotary(x, *in.cos, *in.sin, RotaryLayout::half_split, direction, std::nullopt);
}

AttentionOptions attention_options(const GqaInputs& in) {
  AttentionOptions o;
  o.is_causal = in.is_causal;
  o.enable_gqa = true;
  return o;
}

}  // namespace

Tensor gqa_forward(const GqaBackend& backend, const GqaInputs& in, GqaSaved& saved) {
  const GqaShape s = check_gqa(in);
  const Tensor x = layer::rows(in.x);
  const Tensor query = layer::linear(x, in.q_weight, in.q_bias);  // (batch * seq, heads * head_dim)
  const Tensor key = layer::linear(x, in.k_weight, in.k_bias);    // (batch * seq, kv_heads * head_dim)
  const Tensor value = layer::linear(x, in.v_weight, in.v_bias);  // (batch * seq, kv_heads * v_head_dim)
  rotate(backend, in, s, query, s.heads, RotaryDirection::forward);
  rotate(backend, in, s, key, s.kv_heads, RotaryDirection::forward);

  const Tensor attn = layer::empty_rows(x, s.batch * s.seq, s.heads * s.v_head_dim);
  const Tensor lse = aten::empty(x, {s.batch, s.heads, s.seq}, layer::lse_dtype(x));
  Tensor attn_heads = v_heads(s, attn, s.heads), lse_out = lse;
  backend.attention.forward(qk_heads(s, query, s.heads), qk_heads(s, key, s.kv_heads), v_heads(s, value, s.kv_heads),
                            attention_options(in), attn_heads, lse_out);
  const Tensor out = layer::linear(attn, in.o_weight, in.o_bias);

  const auto sequence = [&](const Tensor& rows) { return layer::sequence(rows, s.batch, s.seq); };
  saved = {sequence(query), sequence(key), sequence(value), sequence(attn), lse};
  return sequence(out);
}

GqaGradients gqa_backward(const GqaBackend& backend, const Tensor& grad_out, const GqaInputs& in, const GqaSaved& saved,
                          int64_t need) {
  const GqaShape s = check_gqa(in);
  layer::check_saved("grad_out", grad_out, {s.batch, s.seq, s.out_embed}, in.x);
  layer::check_saved("query", saved.query, {s.batch, s.seq, s.heads * s.head_dim}, in.x);
  layer::check_saved("key", saved.key, {s.batch, s.seq, s.kv_heads * s.head_dim}, in.x);
  layer::check_saved("value", saved.value, {s.batch, s.seq, s.kv_heads * s.v_head_dim}, in.x);
  layer::check_saved("attn", saved.attn, {s.batch, s.seq, s.heads * s.v_head_dim}, in.x);
  layer::check_saved("lse", saved.lse, {s.batch, s.heads, s.seq}, in.x, layer::lse_dtype(in.x));
  const auto needs = [need](int64_t bits) { return (need & bits) != 0; };

  OptionalTensor grad_x, grad_weight[4], grad_bias[4];  // q, k, v, o
  const auto linear_backward = [&](int i, const Tensor& grad_y, const Tensor& input) {
    if (needs(gqa_need_weight << i)) grad_weight[i] = layer::weight_grad(grad_y, input);
    if (needs(gqa_need_bias << i)) grad_bias[i] = layer::bias_grad(grad_y);
  };
  const Tensor grad_rows = layer::rows(grad_out), attn = layer::rows(saved.attn), x = layer::rows(in.x);
  linear_backward(3, grad_rows, attn);

  bool wanted[3];  // whatever lies behind q, k, v
  for (int i = 0; i < 3; i++) wanted[i] = needs(gqa_need_x | gqa_need_weight << i | gqa_need_bias << i);
  if (wanted[0] || wanted[1] || wanted[2]) {
    const Tensor query = layer::rows(saved.query), key = layer::rows(saved.key), value = layer::rows(saved.value);
    const Tensor grad_attn = layer::input_grad(grad_rows, in.o_weight);
    Tensor grad[3];
    AttentionGradients gradients;
    if (wanted[0]) gradients.query = qk_heads(s, grad[0] = empty_as(query), s.heads);
    if (wanted[1]) gradients.key = qk_heads(s, grad[1] = empty_as(key), s.kv_heads);
    if (wanted[2]) gradients.value = v_heads(s, grad[2] = empty_as(value), s.kv_heads);
    backend.attention.backward(v_heads(s, grad_attn, s.heads), std::nullopt, qk_heads(s, query, s.heads),
                               qk_heads(s, key, s.kv_heads), v_heads(s, value, s.kv_heads), attention_options(in),
                               v_heads(s, attn, s.heads), saved.lse, gradients);
    if (wanted[0]) rotate(backend, in, s, grad[0], s.heads, RotaryDirection::inverse);
    if (wanted[1]) rotate(backend, in, s, grad[1], s.kv_heads, RotaryDirection::inverse);

    for (int i = 0; i < 3; i++)
      if (wanted[i]) linear_backward(i, grad[i], x);
    if (needs(gqa_need_x)) {
      const Tensor rows = layer::input_grad(grad[0], in.q_weight);
      layer::add_mm_into(rows, grad[1], in.k_weight);
      layer::add_mm_into(rows, grad[2], in.v_weight);
      grad_x = layer::sequence(rows, s.batch, s.seq);
    }
  }
  const auto given = [&](const OptionalTensor& grad) { return layer::or_none(grad, in.x); };
  return {given(grad_x),         given(grad_weight[0]), given(grad_weight[1]),
          given(grad_weight[2]), given(grad_weight[3]), given(grad_bias[0]),
          given(grad_bias[1]),   given(grad_bias[2]),   given(grad_bias[3])};
}

}  // namespace attnjourney

// `need` is a bit set in the order of the gradients; a gradient not needed comes back with shape (0,).
STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def(
      "gqa(Tensor x, int num_heads, int num_kv_heads, Tensor q_weight, Tensor k_weight, Tensor v_weight, "
      "Tensor o_weight, Tensor? q_bias=None, Tensor? k_bias=None, Tensor? v_bias=None, Tensor? o_bias=None, *, "
      "Tensor? cos=None, Tensor? sin=None, bool is_causal=True) -> Tensor");
  m.def(
      "gqa_forward(Tensor x, int num_heads, int num_kv_heads, Tensor q_weight, Tensor k_weight, Tensor v_weight, "
      "Tensor o_weight, Tensor? q_bias=None, Tensor? k_bias=None, Tensor? v_bias=None, Tensor? o_bias=None, *, "
      "Tensor? cos=None, Tensor? sin=None, bool is_causal=True) "
      "-> (Tensor out, Tensor query, Tensor key, Tensor value, Tensor attn, Tensor lse)");
  m.def(
      "gqa_backward(Tensor grad_out, Tensor x, int num_heads, int num_kv_heads, Tensor q_weight, Tensor k_weight, "
      "Tensor v_weight, Tensor o_weight, Tensor query, Tensor key, Tensor value, Tensor attn, Tensor lse, *, "
      "Tensor? cos=None, Tensor? sin=None, bool is_causal=True, int need=511) "
      "-> (Tensor grad_x, Tensor grad_q_weight, Tensor grad_k_weight, Tensor grad_v_weight, Tensor grad_o_weight, "
      "Tensor grad_q_bias, Tensor grad_k_bias, Tensor grad_v_bias, Tensor grad_o_bias)");
}
