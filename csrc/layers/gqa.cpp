#include "gqa.h"

#include "core/backend.h"
#include "layers.h"

namespace attnjourney {
namespace {

struct GqaInputs {
  Tensor x;                 // (batch, seq, embed)
  int64_t heads, kv_heads;  // heads = group * kv_heads
  Tensor q_weight;          // (heads * head_dim, embed)
  Tensor k_weight;          // (kv_heads * head_dim, embed)
  Tensor v_weight;          // (kv_heads * v_head_dim, embed)
  Tensor o_weight;          // (out_embed, heads * v_head_dim)
  OptionalTensor q_bias = {}, k_bias = {}, v_bias = {}, o_bias = {};
  OptionalTensor cos = {},
                 sin = {};  // ([batch,] seq, rotary_dim / 2): the first rotary_dim numbers of a head turn, half-split
  bool is_causal = true;

  void read_options(Arguments& arguments) {
    cos = arguments.optional_tensor(), sin = arguments.optional_tensor(), is_causal = arguments.flag();
  }
};

// what the forward keeps for the backward
struct GqaSaved {
  Tensor query;  // (batch, seq, heads * head_dim), turned
  Tensor key;    // (batch, seq, kv_heads * head_dim), turned
  Tensor value;  // (batch, seq, kv_heads * v_head_dim)
  Tensor attn;   // (batch, seq, heads * v_head_dim), what the output projection reads
  Tensor lse;    // (batch, heads, seq)
  Tensor stats;  // lse.shape + (2,): see HeadPointers
};

// bits of `need`; those of the weights (q, k, v, o) and of the biases follow each other
constexpr int64_t gqa_need_x = 1, gqa_need_weight = 1 << 1, gqa_need_bias = 1 << 5;

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
void rotate(const Backend& backend, const GqaInputs& in, const GqaShape& s, const Tensor& rows, int64_t heads,
            RotaryDirection direction) {
  if (s.rotary_dim == 0) return;
  const Tensor x = layer::split_heads(rows, s.batch, s.seq, heads, s.rotary_dim, 0, s.head_dim);
  backend.rotary(x, *in.cos, *in.sin, RotaryLayout::half_split, direction, std::nullopt);
}

GqaInputs read_inputs(Arguments& arguments) {
  return {.x = arguments.tensor(),
          .heads = arguments.integer(),
          .kv_heads = arguments.integer(),
          .q_weight = arguments.tensor(),
          .k_weight = arguments.tensor(),
          .v_weight = arguments.tensor(),
          .o_weight = arguments.tensor()};
}

AttentionArgs attention_args(const GqaInputs& in, const GqaShape& s, const Tensor& query, const Tensor& key,
                             const Tensor& value) {
  AttentionArgs args{.query = qk_heads(s, query, s.heads),
                     .key = qk_heads(s, key, s.kv_heads),
                     .value = v_heads(s, value, s.kv_heads),
                     .options = {}};
  args.options.is_causal = in.is_causal;
  args.options.enable_gqa = true;
  return args;
}

}  // namespace

std::vector<Tensor> gqa_forward(const Backend& backend, Arguments& arguments) {
  GqaInputs in = read_inputs(arguments);
  for (OptionalTensor* bias : {&in.q_bias, &in.k_bias, &in.v_bias, &in.o_bias}) *bias = arguments.optional_tensor();
  in.read_options(arguments);
  const GqaShape s = check_gqa(in);
  const Tensor x = layer::rows(in.x);
  const Tensor query = layer::linear(x, in.q_weight, in.q_bias);  // (batch * seq, heads * head_dim)
  const Tensor key = layer::linear(x, in.k_weight, in.k_bias);    // (batch * seq, kv_heads * head_dim)
  const Tensor value = layer::linear(x, in.v_weight, in.v_bias);  // (batch * seq, kv_heads * v_head_dim)
  rotate(backend, in, s, query, s.heads, RotaryDirection::forward);
  rotate(backend, in, s, key, s.kv_heads, RotaryDirection::forward);

  const Tensor attn = layer::empty_rows(x, s.batch * s.seq, s.heads * s.v_head_dim);
  const Tensor lse = aten::empty(x, {s.batch, s.heads, s.seq}, layer::lse_dtype(x)),
               stats = aten::empty(x, {s.batch, s.heads, s.seq, 2}, layer::lse_dtype(x));
  AttentionCall call = check_attention(attention_args(in, s, query, key, value));
  backend.attention.forward(call, {.out = v_heads(s, attn, s.heads), .lse = lse, .stats = stats});
  const Tensor out = layer::linear(attn, in.o_weight, in.o_bias);

  const auto sequence = [&](const Tensor& rows) { return layer::sequence(rows, s.batch, s.seq); };
  return {sequence(out), sequence(query), sequence(key), sequence(value), sequence(attn), lse, stats};
}

std::vector<Tensor> gqa_backward(const Backend& backend, Arguments& arguments) {
  const Tensor grad_out = arguments.tensor();
  GqaInputs in = read_inputs(arguments);
  const GqaSaved saved{.query = arguments.tensor(),
                       .key = arguments.tensor(),
                       .value = arguments.tensor(),
                       .attn = arguments.tensor(),
                       .lse = arguments.tensor(),
                       .stats = arguments.tensor()};
  in.read_options(arguments);
  const int64_t need = arguments.integer();

  const GqaShape s = check_gqa(in);
  layer::check_saved("grad_out", grad_out, {s.batch, s.seq, s.out_embed}, in.x);
  layer::check_saved("query", saved.query, {s.batch, s.seq, s.heads * s.head_dim}, in.x);
  layer::check_saved("key", saved.key, {s.batch, s.seq, s.kv_heads * s.head_dim}, in.x);
  layer::check_saved("value", saved.value, {s.batch, s.seq, s.kv_heads * s.v_head_dim}, in.x);
  layer::check_saved("attn", saved.attn, {s.batch, s.seq, s.heads * s.v_head_dim}, in.x);
  layer::check_saved("lse", saved.lse, {s.batch, s.heads, s.seq}, in.x, layer::lse_dtype(in.x));
  layer::check_saved("stats", saved.stats, {s.batch, s.heads, s.seq, 2}, in.x, layer::lse_dtype(in.x));
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
    AttentionCall call = check_attention(attention_args(in, s, query, key, value));
    backend.attention.backward(call,
                               {.grad_out = v_heads(s, grad_attn, s.heads),
                                .grad_lse = std::nullopt,
                                .out = v_heads(s, attn, s.heads),
                                .lse = aten::contiguous(saved.lse),
                                .stats = aten::contiguous(saved.stats)},
                               gradients);
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
