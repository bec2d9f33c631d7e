// The backward of csrc/layers/mla.cpp: output projection, attention, then the query's and the key/value's chain down to
// x.
#include "mla_shape.h"

namespace attnjourney {
namespace {

void check_saved(const MlaShape& s, const MlaInputs& in, const MlaSaved& saved, const Tensor& grad_out) {
  const ScalarType rstd_dtype = layer::lse_dtype(in.x);
  layer::check_saved("grad_out", grad_out, {s.batch, s.seq, s.out_embed}, in.x);
  layer::check_saved("query", saved.query, {s.batch, s.seq, s.heads * s.qk}, in.x);
  layer::check_saved("kv", saved.kv, {s.batch, s.seq, s.heads * (s.nope + s.v)}, in.x);
  layer::check_saved("kv_a", saved.kv_a, {s.batch, s.seq, s.kv_lora + s.rope}, in.x);
  layer::check_saved("kv_rstd", saved.kv_rstd, {s.batch, s.seq}, in.x, rstd_dtype);
  if (in.q_a_weight) {
    layer::check_saved("q_a", saved.q_a, {s.batch, s.seq, s.q_lora}, in.x);
    layer::check_saved("q_rstd", saved.q_rstd, {s.batch, s.seq}, in.x, rstd_dtype);
  }
  layer::check_saved("attn", saved.attn, {s.batch, s.seq, s.heads * s.v}, in.x);
  layer::check_saved("lse", saved.lse, {s.batch, s.heads, s.seq}, in.x, rstd_dtype);
  layer::check_saved("stats", saved.stats, {s.batch, s.heads, s.seq, 2}, in.x, rstd_dtype);
}

// out (batch, 1, seq, rope) = sum over the heads of grad (batch, heads, seq, rope)
void sum_heads_into(const Tensor& out, const Tensor& grad) {
  const int64_t dim = 1;
  aten::call("aten::sum", "IntList_out", grad, std::optional<IntHeaderOnlyArrayRef>(IntHeaderOnlyArrayRef(&dim, 1)),
             true, std::optional<ScalarType>(), out);
}

struct Backward {
  const Backend& backend;
  const MlaInputs& in;
  const MlaSaved& saved;
  const MlaShape s;
  const int64_t need;
  const Tensor x = layer::rows(in.x);  // (batch * seq, embed)
  OptionalTensor grad_x{};             // (batch * seq, embed)
  OptionalTensor grad_q_a_weight{}, grad_q_a_norm_weight{}, grad_q_b_weight{};
  OptionalTensor grad_kv_a_weight{}, grad_kv_a_norm_weight{}, grad_kv_b_weight{}, grad_o_weight{};

  bool needs(int64_t bits) const { return (need & bits) != 0; }
  Tensor empty(int64_t width) const { return layer::empty_rows(x, s.rows, width); }

  void run(const Tensor& grad_out) {
    const Tensor grad_rows = layer::rows(grad_out), attn = layer::rows(saved.attn);
    if (needs(mla_need_o_weight)) grad_o_weight = layer::weight_grad(grad_rows, attn);
    const bool need_query = needs(mla_need_x | mla_need_q_a_weight | mla_need_q_a_norm_weight | mla_need_q_b_weight);
    const bool need_kv = needs(mla_need_x | mla_need_kv_a_weight | mla_need_kv_a_norm_weight | mla_need_kv_b_weight);
    if (!need_query && !need_kv) return;

    const Tensor query = layer::rows(saved.query), kv = layer::rows(saved.kv);
    const Tensor key = mla_assemble_key(s, kv, layer::rows(saved.kv_a));
    const Tensor grad_attn = layer::input_grad(grad_rows, in.o_weight);
    Tensor grad_query, grad_key, grad_kv;  // rows like query, key, kv
    AttentionGradients gradients;
    if (need_query) {
      grad_query = empty(s.heads * s.qk);
      gradients.query = s.heads_of(grad_query, s.qk);
    }
    if (need_kv) {
      grad_key = empty(s.heads * s.qk);
      grad_kv = empty(s.heads * (s.nope + s.v));
      gradients.key = s.heads_of(grad_key, s.qk);
      gradients.value = s.value_of(grad_kv);
    }
    AttentionCall call = check_attention(mla_attention_args(in, s, query, key, kv));
    backend.attention.backward(call,
                               {.grad_out = s.heads_of(grad_attn, s.v),
                                .grad_lse = std::nullopt,
                                .out = s.heads_of(attn, s.v),
                                .lse = aten::contiguous(saved.lse),
                                .stats = aten::contiguous(saved.stats)},
                               gradients);
    if (need_query) query_chain(grad_query);
    if (need_kv) key_value_chain(grad_key, grad_kv);
  }

  void query_chain(const Tensor& grad_query) {
    mla_rotate(backend, in, s.rope_of(grad_query), RotaryDirection::inverse);
    if (!in.q_a_weight) return linear_backward(grad_query, x, in.q_b_weight, mla_need_q_b_weight, grad_q_b_weight);
    OptionalTensor grad_q_a;
    if (needs(mla_need_x | mla_need_q_a_weight)) grad_q_a = empty(s.q_lora);
    latent_backward(grad_query, in.q_b_weight, layer::rows(saved.q_a), *in.q_a_norm_weight, saved.q_rstd, grad_q_a,
                    mla_need_q_b_weight, grad_q_b_weight, mla_need_q_a_norm_weight, grad_q_a_norm_weight);
    if (grad_q_a) linear_backward(*grad_q_a, x, *in.q_a_weight, mla_need_q_a_weight, grad_q_a_weight);
  }

  void key_value_chain(const Tensor& grad_key, const Tensor& grad_kv) {
    Tensor grad_nope = s.kv_nope(grad_kv);
    if (s.nope > 0) torch::stable::copy_(grad_nope, s.key_nope(grad_key));
    OptionalTensor grad_kv_a, grad_latent;  // all of a row, and its first kv_lora columns
    if (needs(mla_need_x | mla_need_kv_a_weight)) {
      grad_kv_a = empty(s.kv_lora + s.rope);
      grad_latent = s.latent_of(*grad_kv_a);
    }
    latent_backward(grad_kv, in.kv_b_weight, s.latent_of(layer::rows(saved.kv_a)), in.kv_a_norm_weight, saved.kv_rstd,
                    grad_latent, mla_need_kv_b_weight, grad_kv_b_weight, mla_need_kv_a_norm_weight,
                    grad_kv_a_norm_weight);
    if (!grad_kv_a) return;
    if (s.rope > 0) {
      const Tensor grad_shared = s.shared_key(*grad_kv_a);
      sum_heads_into(grad_shared, s.rope_of(grad_key));
      mla_rotate(backend, in, grad_shared, RotaryDirection::inverse);
    }
    linear_backward(*grad_kv_a, x, in.kv_a_weight, mla_need_kv_a_weight, grad_kv_a_weight);
  }

  // y = x weight^T
  void linear_backward(const Tensor& grad_y, const Tensor& input, const Tensor& weight, int64_t weight_bit,
                       OptionalTensor& grad_weight) {
    if (needs(weight_bit)) grad_weight = layer::weight_grad(grad_y, input);
    if (!needs(mla_need_x)) return;
    if (!grad_x)
      grad_x = layer::input_grad(grad_y, weight);
    else
      layer::add_mm_into(*grad_x, grad_y, weight);
  }

  // y = rms_norm(latent) weight^T; writes grad_latent if given. The normed latent is recomputed: it was not kept.
  void latent_backward(const Tensor& grad_y, const Tensor& weight, const Tensor& latent, const Tensor& norm_weight_,
                       const Tensor& rstd_, const OptionalTensor& grad_latent, int64_t weight_bit,
                       OptionalTensor& grad_weight, int64_t norm_bit, OptionalTensor& grad_norm_weight) {
    const Tensor norm_weight = aten::contiguous(norm_weight_);
    const Tensor rstd = aten::strided_view(aten::contiguous(rstd_), {s.rows}, {1});
    if (needs(weight_bit)) {
      const Tensor normed = empty(latent.size(1));
      backend.rms_norm.apply(latent, norm_weight, rstd, normed);
      grad_weight = layer::weight_grad(grad_y, normed);
    }
    if (!grad_latent && !needs(norm_bit)) return;
    if (needs(norm_bit)) grad_norm_weight = aten::empty(x, {norm_weight.size(0)});
    backend.rms_norm.backward(layer::input_grad(grad_y, weight), latent, norm_weight, rstd, grad_latent,
                              grad_norm_weight);
  }
};

}  // namespace

std::vector<Tensor> mla_backward(const Backend& backend, Arguments& arguments) {
  const Tensor grad_out = arguments.tensor();
  MlaInputs in = read_mla_inputs(arguments);
  const MlaSaved saved{.query = arguments.tensor(),
                       .kv = arguments.tensor(),
                       .kv_a = arguments.tensor(),
                       .kv_rstd = arguments.tensor(),
                       .q_a = arguments.tensor(),
                       .q_rstd = arguments.tensor(),
                       .attn = arguments.tensor(),
                       .lse = arguments.tensor(),
                       .stats = arguments.tensor()};
  read_mla_options(arguments, in);
  int64_t need = arguments.integer();

  const MlaShape s = check_mla(in);
  check_saved(s, in, saved, grad_out);
  if (!in.q_a_weight) need &= ~int64_t{mla_need_q_a_weight | mla_need_q_a_norm_weight};
  Backward b{backend, in, saved, s, need};
  b.run(grad_out);
  if (b.grad_x) b.grad_x = layer::sequence(*b.grad_x, s.batch, s.seq);
  const auto given = [&](const OptionalTensor& grad) { return layer::or_none(grad, in.x); };
  return {given(b.grad_x),           given(b.grad_q_a_weight),  given(b.grad_q_a_norm_weight),
          given(b.grad_q_b_weight),  given(b.grad_kv_a_weight), given(b.grad_kv_a_norm_weight),
          given(b.grad_kv_b_weight), given(b.grad_o_weight)};
}

}  // namespace attnjourney
