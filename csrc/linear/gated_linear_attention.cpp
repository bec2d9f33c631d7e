#include "gated_linear_attention.h"

#include <cmath>
#include <utility>

#include "core/backend.h"

namespace attnjourney {
namespace {

// gate and beta: there or not as the update wants it
void check_presence(const char* name, const OptionalTensor& t, bool wanted, const char* update) {
  check_value(t.has_value() == wanted, name, ": expected ", wanted ? "a tensor" : "None", " with update '", update,
              "', got ", wanted ? "None" : "a tensor");
}

void check_number_a_row(const char* name, const Tensor& t, const Tensor& query) {
  const ScalarType own = dtype_of(query), given = dtype_of(t);
  check_dtype(given == own || given == (own == ScalarType::Double ? own : ScalarType::Float), name, t, "dtype ",
              OrFloat32{own == ScalarType::Double ? ScalarType::Float : own, "query"});
  check_same_device(name, t, "query", query);
}

std::vector<int64_t> gated_state_shape(const GatedCall& c) {
  return {c.sequences, c.v_heads, c.params.head_dim, c.params.v_head_dim};
}
constexpr const char* state_meaning = "(sequences, v_heads, head_dim, v_head_dim)";

void check_state(const char* name, const OptionalTensor& t, const GatedCall& c, const Tensor& query) {
  if (!t) return;
  check_dtype(dtype_of(*t) == c.state_dtype, name, *t, "dtype ", dtype_text(c.state_dtype));
  check_shape(name, *t, gated_state_shape(c), state_meaning);
  check_same_device(name, *t, "query", query);
}

GatedInputs read_gated_inputs(Arguments& arguments) {
  return {.query = arguments.tensor(),
          .key = arguments.tensor(),
          .value = arguments.tensor(),
          .gate = arguments.optional_tensor(),
          .beta = arguments.optional_tensor(),
          .initial_state = arguments.optional_tensor(),
          .cu_seqlens = arguments.optional_tensor(),
          .update = arguments.integer(),
          .scale = arguments.number(),
          .qk_l2norm = arguments.flag()};
}

}  // namespace

GatedCall check_gated_linear_attention(const GatedInputs& in) {
  const Tensor &q = in.query, &k = in.key, &v = in.value;
  GatedCall c;
  GatedParams& p = c.params;
  check_dim("query", q, 4);
  check_floating("query", q);
  for (const auto& [name, t] : {std::pair{"key", &k}, std::pair{"value", &v}}) {
    check_same_dtype(name, *t, "query", q);
    check_same_device(name, *t, "query", q);
    check_dim(name, *t, 4);
  }
  c.dtype = q.scalar_type();
  c.state_dtype = c.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  c.batch = c.sequences = q.size(0), c.q_heads = q.size(1), c.kv_heads = k.size(1), c.v_heads = v.size(1);
  c.len = q.size(2), p.head_dim = q.size(3), p.v_head_dim = v.size(3);
  check_value(p.head_dim > 0, "query: expected a head_dim (last dimension) of at least 1, got shape ", shape_text(q));
  check_shape("key", k, {c.batch, c.kv_heads, c.len, p.head_dim}, "(batch, kv_heads, len, head_dim)");
  check_shape("value", v, {c.batch, c.v_heads, c.len, p.v_head_dim}, "(batch, v_heads, len, v_head_dim)");
  check_value(c.kv_heads > 0 ? c.v_heads % c.kv_heads == 0 : c.v_heads == 0,
              "key: expected a head count that divides value's, ", c.v_heads, ", got ", c.kv_heads, " (key has shape ",
              shape_text(k), ")");
  check_value(c.q_heads == c.v_heads ||
                  (c.q_heads > 0 && c.v_heads > 0 && (c.q_heads % c.v_heads == 0 || c.v_heads % c.q_heads == 0)),
              "query: expected a head count that divides value's, ", c.v_heads, ", or is a multiple of it, got ",
              c.q_heads, " (query has shape ", shape_text(q), ")");
  p.group = c.q_heads > c.v_heads ? c.q_heads / c.v_heads : 1;
  check_value(extent(c.batch, c.out_heads(), c.len, p.head_dim) <= most_numbers / 4 &&
                  extent(c.batch, c.out_heads(), c.len, p.v_head_dim) <= most_numbers / 4 &&
                  extent(c.batch, c.v_heads, p.head_dim, p.v_head_dim) <= most_numbers / 4,
              "query, key, value: expected at most 2^54 numbers, got shapes ", shape_text(q), ", ", shape_text(k),
              " and ", shape_text(v));
  constexpr const char* names[] = {"linear", "gated", "delta", "gated_delta", "kda"};
  check_value(in.update >= 0 && in.update <= 4,
              "update: expected 0 (linear), 1 (gated), 2 (delta), 3 (gated_delta) or 4 (kda), got ", in.update);
  const auto update = static_cast<GatedUpdate>(in.update);
  const char* name = names[in.update];
  const bool gated = update != GatedUpdate::linear && update != GatedUpdate::delta;
  p.delta = update != GatedUpdate::linear && update != GatedUpdate::gated;
  check_presence("gate", in.gate, gated, name);
  check_presence("beta", in.beta, p.delta, name);
  if (in.gate) {
    check_number_a_row("gate", *in.gate, q);
    const bool channels = update == GatedUpdate::kda || in.gate->dim() == 4;
    p.gate = channels ? Gate::channel : Gate::head;
    if (channels)
      check_shape("gate", *in.gate, {c.batch, c.v_heads, c.len, p.head_dim}, "(batch, v_heads, len, head_dim)");
    else
      check_shape("gate", *in.gate, {c.batch, c.v_heads, c.len}, "(batch, v_heads, len)");
  }
  if (in.beta) {
    check_number_a_row("beta", *in.beta, q);
    check_shape("beta", *in.beta, {c.batch, c.v_heads, c.len}, "(batch, v_heads, len)");
  }
  if (in.cu_seqlens) {
    const Tensor& t = *in.cu_seqlens;
    const ScalarType type = dtype_of(t);
    check_dtype(type == ScalarType::Long || type == ScalarType::Int, "cu_seqlens", t,
                "dtype torch.int64 or torch.int32");
    check_value(t.dim() == 1 && t.size(0) >= 1, "cu_seqlens: expected shape (sequences + 1,), got ", shape_text(t));
    check_same_device("cu_seqlens", t, "query", q);
    check_value(c.batch == 1, "query: expected a batch of 1 with cu_seqlens, got shape ", shape_text(q));
    c.sequences = t.size(0) - 1;
  }
  check_value(std::isfinite(in.scale), "scale: expected a finite number, got ", in.scale);
  p.scale = in.scale;
  p.norm_eps = in.qk_l2norm ? 1e-6 : -1;
  check_state("initial_state", in.initial_state, c, q);
  return c;
}

std::vector<Tensor> gated_linear_attention_forward(const Backend& backend, Arguments& arguments) {
  const GatedInputs in = read_gated_inputs(arguments);
  const GatedCall c = check_gated_linear_attention(in);
  const Tensor out = aten::empty(in.query, {c.batch, c.out_heads(), c.len, c.params.v_head_dim});
  const Tensor state = aten::empty(in.query, gated_state_shape(c), c.state_dtype);
  backend.gated.forward(c, in, out, state);
  return {out, state};
}

std::vector<Tensor> gated_linear_attention_backward(const Backend& backend, Arguments& arguments) {
  const OptionalTensor given = arguments.optional_tensor(), grad_state = arguments.optional_tensor();
  const GatedInputs in = read_gated_inputs(arguments);
  const int64_t need = arguments.integer();
  const GatedCall c = check_gated_linear_attention(in);
  check_value(need >= 0 && need < 64, "need: expected a bit set from 0 to 63, got ", need);
  const std::vector<int64_t> out_shape{c.batch, c.out_heads(), c.len, c.params.v_head_dim};
  if (given) {
    check_same_dtype("grad_out", *given, "query", in.query);
    check_shape("grad_out", *given, out_shape, "(batch, out_heads, len, v_head_dim)");
    check_same_device("grad_out", *given, "query", in.query);
  }
  check_state("grad_state", grad_state, c, in.query);
  const Tensor grad_out = given ? *given : aten::empty(in.query, out_shape);
  if (!given) aten::clear(grad_out);
  const OptionalTensor inputs[] = {in.query, in.key, in.value, in.gate, in.beta, in.initial_state};
  GatedGradients gradients{aten::none(in.query), aten::none(in.query), aten::none(in.query),
                           aten::none(in.query), aten::none(in.query), aten::none(in.query)};
  for (size_t i = 0; i < gradients.size(); i++) {
    if (!(need >> i & 1) || !inputs[i]) continue;
    const auto sizes = inputs[i]->sizes();
    gradients[i] =
        aten::empty(in.query, std::vector<int64_t>(sizes.begin(), sizes.end()), i < 3 ? c.dtype : c.state_dtype);
  }
  backend.gated.backward(c, in, grad_out, grad_state, gradients);
  for (size_t i : {size_t{3}, size_t{4}})
    if (need >> i & 1 && inputs[i] && inputs[i]->scalar_type() != c.state_dtype)
      gradients[i] = torch::stable::to(gradients[i], inputs[i]->scalar_type());
  return {gradients.begin(), gradients.end()};
}

}  // namespace attnjourney
