#include "mla.h"

#include <cmath>

#include "mla_shape.h"

namespace attnjourney {

MlaShape check_mla(const MlaInputs& in) {
  MlaShape s{};
  layer::check_sequence("x", in.x);
  s.batch = in.x.size(0), s.seq = in.x.size(1), s.embed = in.x.size(2), s.rows = s.batch * s.seq;
  s.heads = in.heads, s.nope = in.nope, s.rope = in.rope, s.v = in.v;
  check_value(s.heads > 0, "num_heads: expected a positive number, got ", s.heads);
  check_value(s.nope >= 0, "qk_nope_head_dim: expected a number of at least 0, got ", s.nope);
  check_value(s.rope >= 0, "qk_rope_head_dim: expected a number of at least 0, got ", s.rope);
  for (const int64_t n : {s.heads, s.nope, s.rope, s.v})  // their sums and products fit in 64 bits
    check_value(n < (int64_t{1} << 30), "num_heads, head dimensions: expected numbers below 2^30, got ", n);
  s.qk = s.nope + s.rope;
  check_value(s.qk > 0, "qk_nope_head_dim, qk_rope_head_dim: expected a sum of at least 1, got 0");
  check_value(s.v > 0, "v_head_dim: expected a positive number, got ", s.v);
  check_value(in.eps >= 0 && std::isfinite(in.eps), "eps: expected a finite number of at least 0, got ", in.eps);

  const bool has_q_a = in.q_a_weight.has_value();
  check_value(in.q_a_norm_weight.has_value() == has_q_a, has_q_a ? "q_a_norm_weight" : "q_a_weight",
              ": expected a tensor beside ", has_q_a ? "q_a_weight" : "q_a_norm_weight", ", got None");
  if (has_q_a) {
    check_dim("q_a_weight", *in.q_a_weight, 2);
    s.q_lora = in.q_a_weight->size(0);
    check_value(s.q_lora > 0, "q_a_weight: expected at least one row, got shape ", shape_text(*in.q_a_weight));
    layer::check_weight("q_a_weight", *in.q_a_weight, s.q_lora, s.embed, "x", in.x);
    layer::check_bias("q_a_norm_weight", in.q_a_norm_weight, s.q_lora, "x", in.x);
  }
  layer::check_weight("q_b_weight", in.q_b_weight, s.heads * s.qk, has_q_a ? s.q_lora : s.embed, "x", in.x);
  check_dim("kv_a_weight", in.kv_a_weight, 2);
  s.kv_lora = in.kv_a_weight.size(0) - s.rope;
  check_value(s.kv_lora > 0, "kv_a_weight: expected more rows than qk_rope_head_dim, ", s.rope, ", got shape ",
              shape_text(in.kv_a_weight));
  layer::check_weight("kv_a_weight", in.kv_a_weight, s.kv_lora + s.rope, s.embed, "x", in.x);
  layer::check_weight("kv_a_norm_weight", in.kv_a_norm_weight, s.kv_lora, -1, "x", in.x);
  layer::check_weight("kv_b_weight", in.kv_b_weight, s.heads * (s.nope + s.v), s.kv_lora, "x", in.x);
  check_dim("o_weight", in.o_weight, 2);
  s.out_embed = in.o_weight.size(0);
  layer::check_weight("o_weight", in.o_weight, s.out_embed, s.heads * s.v, "x", in.x);

  if (in.cos || in.sin) {
    const int64_t rotary_dim = check_rotary(in.cos, in.sin, s.batch, s.seq, "x", in.x);
    check_value(rotary_dim == s.rope, "cos: expected shape (", s.seq, ", qk_rope_head_dim / 2), qk_rope_head_dim is ",
                s.rope, ", got ", shape_text(*in.cos));
  }
  return s;
}

MlaInputs read_mla_inputs(Arguments& arguments) {
  return {.x = arguments.tensor(),
          .heads = arguments.integer(),
          .nope = arguments.integer(),
          .rope = arguments.integer(),
          .v = arguments.integer(),
          .q_a_weight = arguments.optional_tensor(),
          .q_a_norm_weight = arguments.optional_tensor(),
          .q_b_weight = arguments.tensor(),
          .kv_a_weight = arguments.tensor(),
          .kv_a_norm_weight = arguments.tensor(),
          .kv_b_weight = arguments.tensor(),
          .o_weight = arguments.tensor()};
}

void read_mla_options(Arguments& arguments, MlaInputs& in) {
  in.cos = arguments.optional_tensor(), in.sin = arguments.optional_tensor();
  in.is_causal = arguments.flag(), in.scale = arguments.optional_number();
}

AttentionArgs mla_attention_args(const MlaInputs& in, const MlaShape& s, const Tensor& query, const Tensor& key,
                                 const Tensor& kv) {
  AttentionArgs args{
      .query = s.heads_of(query, s.qk), .key = s.heads_of(key, s.qk), .value = s.value_of(kv), .options = {}};
  args.options.is_causal = in.is_causal;
  args.options.scale = in.scale;
  return args;
}

Tensor mla_assemble_key(const MlaShape& s, const Tensor& kv, const Tensor& kv_a) {
  const Tensor key = layer::empty_rows(kv, s.rows, s.heads * s.qk);
  Tensor nope = s.key_nope(key), rope = s.rope_of(key);
  if (s.nope > 0) torch::stable::copy_(nope, s.kv_nope(kv));
  if (s.rope > 0) torch::stable::copy_(rope, s.repeated_key(kv_a));
  return key;
}

std::vector<Tensor> mla_forward(const Backend& backend, Arguments& arguments) {
  MlaInputs in = read_mla_inputs(arguments);
  read_mla_options(arguments, in);
  in.eps = arguments.number();
  const MlaShape s = check_mla(in);
  const Tensor x = layer::rows(in.x);
  const ScalarType rstd_dtype = layer::lse_dtype(x);
  const auto normed = [&](const Tensor& latent, const Tensor& weight, Tensor& rstd) {
    const Tensor y = layer::empty_rows(x, s.rows, latent.size(1));
    rstd = aten::empty(x, {s.rows}, rstd_dtype);
    backend.rms_norm.forward(latent, aten::contiguous(weight), in.eps, y, rstd);
    return y;
  };

  OptionalTensor q_a;  // (batch * seq, q_lora)
  Tensor query_input = x, q_rstd, kv_rstd;
  if (in.q_a_weight) {
    q_a = layer::linear(x, *in.q_a_weight, std::nullopt);
    query_input = normed(*q_a, *in.q_a_norm_weight, q_rstd);
  }
  const Tensor query = layer::linear(query_input, in.q_b_weight, std::nullopt);  // (batch * seq, heads * (nope + rope))
  const Tensor kv_a = layer::linear(x, in.kv_a_weight, std::nullopt);            // (batch * seq, kv_lora + rope)
  const Tensor latent = normed(s.latent_of(kv_a), in.kv_a_norm_weight, kv_rstd);
  const Tensor kv = layer::linear(latent, in.kv_b_weight, std::nullopt);  // (batch * seq, heads * (nope + v))
  mla_rotate(backend, in, s.rope_of(query), RotaryDirection::forward);
  mla_rotate(backend, in, s.shared_key(kv_a), RotaryDirection::forward);

  const Tensor attn = layer::empty_rows(x, s.rows, s.heads * s.v);
  const Tensor lse = aten::empty(x, {s.batch, s.heads, s.seq}, rstd_dtype),
               stats = aten::empty(x, {s.batch, s.heads, s.seq, 2}, rstd_dtype);
  AttentionCall call = check_attention(mla_attention_args(in, s, query, mla_assemble_key(s, kv, kv_a), kv));
  backend.attention.forward(call, {.out = s.heads_of(attn, s.v), .lse = lse, .stats = stats});
  const Tensor out = layer::linear(attn, in.o_weight, std::nullopt);

  const auto sequence = [&](const Tensor& rows) { return layer::sequence(rows, s.batch, s.seq); };
  const auto per_row = [&](const Tensor& rstd) { return aten::strided_view(rstd, {s.batch, s.seq}, {s.seq, 1}); };
  return {sequence(out),
          sequence(query),
          sequence(kv),
          sequence(kv_a),
          per_row(kv_rstd),
          q_a ? sequence(*q_a) : aten::none(x),
          q_a ? per_row(q_rstd) : aten::empty(x, {0}, rstd_dtype),
          sequence(attn),
          lse,
          stats};
}

}  // namespace attnjourney
