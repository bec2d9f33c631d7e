#include "linear_attention.h"

#include <cmath>
#include <utility>

#include "core/backend.h"

namespace attnjourney {
namespace {

void check_exact_dtype(const char* name, const Tensor& t, ScalarType expected) {
  check_dtype(dtype_of(t) == expected, name, t, "dtype ", dtype_text(expected));
}

struct Shape {
  std::vector<int64_t> sizes;
  const char* meaning;
};

// An operand beside query: of that dtype and shape, on its device.
void check_operand(const char* name, const Tensor& t, ScalarType dtype, Shape shape, const Tensor& query) {
  check_exact_dtype(name, t, dtype);
  check_shape(name, t, shape.sizes, shape.meaning);
  check_same_device(name, t, "query", query);
}

// The shapes of what a call hands on, and of its gradients; without normalize there is neither of the last two.
Shape state_shape(const LinearCall& c) {
  return {{c.batch, c.kv_heads, c.params.head_dim, c.params.v_head_dim}, "(batch, kv_heads, head_dim, v_head_dim)"};
}
Shape normalizer_shape(const LinearCall& c) {
  if (!c.params.normalize) return {{0}, "(0,)"};
  return {{c.batch, c.kv_heads, c.params.head_dim}, "(batch, kv_heads, head_dim)"};
}
Shape denominator_shape(const LinearCall& c) {
  if (!c.params.normalize) return {{0}, "(0,)"};
  return {{c.batch, c.q_heads, c.params.q_len}, "(batch, q_heads, q_len)"};
}

}  // namespace

LinearCall check_linear_attention(const LinearInputs& in) {
  const Tensor &q = in.query, &k = in.key, &v = in.value;
  LinearCall c;
  check_dim("query", q, 4);
  check_floating("query", q);
  check_same_dtype("key", k, "query", q);
  check_same_dtype("value", v, "query", q);
  check_same_device("key", k, "query", q);
  check_same_device("value", v, "query", q);
  check_dim("key", k, 4);
  check_dim("value", v, 4);
  LinearParams& p = c.params;
  c.dtype = q.scalar_type();
  c.state_dtype = c.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  c.batch = q.size(0), c.q_heads = q.size(1), c.kv_heads = k.size(1);
  p.q_len = q.size(2), p.kv_len = k.size(2), p.head_dim = q.size(3), p.v_head_dim = v.size(3);
  check_value(extent(c.batch, c.q_heads, p.q_len, p.head_dim) <= most_numbers &&
                  extent(c.batch, c.q_heads, p.q_len, p.v_head_dim) <= most_numbers &&
                  extent(c.batch, c.kv_heads, p.head_dim, p.v_head_dim) <= most_numbers / 4,
              "query, key, value: expected at most 2^56 numbers, got shapes ", shape_text(q), ", ", shape_text(k),
              " and ", shape_text(v));
  check_value(p.head_dim > 0, "query: expected a head_dim (last dimension) of at least 1, got shape ", shape_text(q));
  check_value(c.kv_heads > 0 ? c.q_heads % c.kv_heads == 0 : c.q_heads == 0,
              "key: expected a head count that divides query's, ", c.q_heads, ", got ", c.kv_heads, " (key has shape ",
              shape_text(k), ")");
  p.group = c.kv_heads > 0 ? c.q_heads / c.kv_heads : 1;
  check_shape("key", k, {c.batch, c.kv_heads, p.kv_len, p.head_dim}, "(batch, kv_heads, kv_len, head_dim)");
  check_shape("value", v, {c.batch, c.kv_heads, p.kv_len, p.v_head_dim}, "(batch, kv_heads, kv_len, v_head_dim)");
  check_value(!in.is_causal || p.q_len == p.kv_len, "key: expected as many keys as query rows with is_causal, ",
              p.q_len, ", got ", p.kv_len);
  check_value(in.feature_map >= 0 && in.feature_map <= 2,
              "feature_map: expected 0 (identity), 1 (relu) or 2 (elu+1), "
              "got ",
              in.feature_map);
  check_value(std::isfinite(in.scale), "scale: expected a finite number, got ", in.scale);
  check_value(std::isfinite(in.eps) && in.eps >= 0, "eps: expected a finite number of at least 0, got ", in.eps);
  p.scale = in.scale, p.eps = in.eps, p.causal = in.is_causal, p.normalize = in.normalize;
  p.feature_map = static_cast<FeatureMap>(in.feature_map);
  if (in.key_padding_mask)
    check_operand("key_padding_mask", *in.key_padding_mask, ScalarType::Bool, {{c.batch, p.kv_len}, "(batch, kv_len)"},
                  q);
  if (in.initial_state) check_operand("initial_state", *in.initial_state, c.state_dtype, state_shape(c), q);
  check_value(in.initial_normalizer.has_value() == (in.normalize && in.initial_state.has_value()),
              in.initial_normalizer ? "initial_normalizer: expected None without normalize or without initial_state"
                                    : "initial_normalizer: expected a tensor beside initial_state with normalize, got "
                                      "None");
  if (in.initial_normalizer)
    check_operand("initial_normalizer", *in.initial_normalizer, c.state_dtype, normalizer_shape(c), q);
  return c;
}

std::vector<Tensor> linear_attention_forward(const Backend& backend, Arguments& arguments) {
  const LinearInputs in{.query = arguments.tensor(),
                        .key = arguments.tensor(),
                        .value = arguments.tensor(),
                        .key_padding_mask = arguments.optional_tensor(),
                        .initial_state = arguments.optional_tensor(),
                        .initial_normalizer = arguments.optional_tensor(),
                        .feature_map = arguments.integer(),
                        .is_causal = arguments.flag(),
                        .scale = arguments.number(),
                        .normalize = arguments.flag(),
                        .eps = arguments.number()};
  const LinearCall c = check_linear_attention(in);
  const LinearParams& p = c.params;
  const Tensor out = aten::empty(in.query, {c.batch, c.q_heads, p.q_len, p.v_head_dim});
  const Tensor state = aten::empty(in.query, state_shape(c).sizes, c.state_dtype);
  const Tensor denominator = aten::empty(in.query, denominator_shape(c).sizes, c.state_dtype);
  const Tensor normalizer = aten::empty(in.query, normalizer_shape(c).sizes, c.state_dtype);
  backend.linear.forward(c, in, out, denominator, state, normalizer);
  return {out, denominator, state, normalizer};
}

std::vector<Tensor> linear_attention_backward(const Backend& backend, Arguments& arguments) {
  const Tensor grad_of_out = arguments.tensor();
  const OptionalTensor grad_of_denominator = arguments.optional_tensor();
  const OptionalTensor grad_of_state = arguments.optional_tensor(), grad_of_normalizer = arguments.optional_tensor();
  LinearInputs in{.query = arguments.tensor(),
                  .key = arguments.tensor(),
                  .value = arguments.tensor(),
                  .key_padding_mask = arguments.optional_tensor(),
                  .initial_state = arguments.optional_tensor(),
                  .initial_normalizer = arguments.optional_tensor()};
  LinearGradientInputs grads{.grad_out = grad_of_out,
                             .grad_denominator = grad_of_denominator,
                             .grad_state = grad_of_state,
                             .grad_normalizer = grad_of_normalizer,
                             .out = arguments.tensor(),
                             .denominator = arguments.tensor()};
  in.feature_map = arguments.integer(), in.is_causal = arguments.flag(), in.scale = arguments.number();
  in.normalize = arguments.flag(), in.eps = arguments.number();
  const int64_t need = arguments.integer();

  const LinearCall c = check_linear_attention(in);
  const LinearParams& p = c.params;
  check_value(need >= 0 && need < 32, "need: expected a bit set from 0 to 31, got ", need);
  for (const auto& [name, t] : {std::pair{"grad_out", &grads.grad_out}, {"out", &grads.out}}) {
    check_same_dtype(name, *t, "query", in.query);
    check_shape(name, *t, {c.batch, c.q_heads, p.q_len, p.v_head_dim}, "(batch, q_heads, q_len, v_head_dim)");
    check_same_device(name, *t, "query", in.query);
  }
  check_operand("denominator", grads.denominator, c.state_dtype, denominator_shape(c), in.query);
  if (grads.grad_denominator)
    check_operand("grad_denominator", *grads.grad_denominator, c.state_dtype, denominator_shape(c), in.query);
  if (grads.grad_state) check_operand("grad_state", *grads.grad_state, c.state_dtype, state_shape(c), in.query);
  if (grads.grad_normalizer)
    check_operand("grad_normalizer", *grads.grad_normalizer, c.state_dtype, normalizer_shape(c), in.query);
  if (!p.normalize) grads.grad_denominator.reset(), grads.grad_normalizer.reset();
  const Tensor none = aten::none(in.query);
  const auto like = [&](int bits, const Tensor& t) {
    if (!(need & bits)) return none;
    return aten::empty(t, {t.size(0), t.size(1), t.size(2), t.size(3)});
  };
  const bool normalizer = need & 16 && in.initial_normalizer;
  const LinearGradients result{like(1, in.query), like(6, in.key), like(6, in.value),
                               in.initial_state ? like(8, *in.initial_state) : none,
                               normalizer ? aten::empty(in.query, normalizer_shape(c).sizes, c.state_dtype) : none};
  backend.linear.backward(c, in, grads, result);
  const auto& [grad_query, grad_key, grad_value, grad_state, grad_normalizer] = result;
  return {grad_query, need & 2 ? grad_key : none, need & 4 ? grad_value : none, grad_state, grad_normalizer};
}

}  // namespace attnjourney
