#include "attention_operators.h"

namespace attnjourney {
namespace {

void check_shape(const char* name, const Tensor& t, const std::vector<int64_t>& want) {
  bool ok = t.dim() == static_cast<int64_t>(want.size());
  for (size_t d = 0; ok && d < want.size(); d++) ok = t.size(static_cast<int64_t>(d)) == want[d];
  if (ok) return;
  std::string s;
  for (int64_t n : want) s += (s.empty() ? "" : ", ") + std::to_string(n);
  check_value(false, name, ": expected shape (", s, want.size() == 1 ? ",)" : ")", ", got ", shape_text(t));
}

// sums what broadcasting repeated, down to the shape of `like`
Tensor reduce_to(const Tensor& grad, const Tensor& like) {
  Tensor g = grad;
  std::vector<int64_t> missing, repeated;
  const int64_t extra = grad.dim() - like.dim();
  for (int64_t d = 0; d < grad.dim(); d++) {
    if (d < extra)
      missing.push_back(d);
    else if (like.size(d - extra) != grad.size(d))
      repeated.push_back(d - extra);
  }
  if (!missing.empty()) g = aten::sum(g, missing);
  if (!repeated.empty()) g = aten::sum(g, repeated, true);
  return g;
}

// key and value gradients come per kv head of the call, of which the tensor itself may have fewer
Tensor reduce_heads(const AttentionCall& c, const Tensor& grad, const Tensor& like) {
  const int64_t own = c.rank >= 3 ? like.size(c.rank - 3) : 1;
  if (c.rank < 3 || own == c.kv_heads || own == 1) return reduce_to(grad, like);
  std::vector<int64_t> s(c.batch_size, c.batch_size + c.batch_dims);
  s.insert(s.end(), {own, c.kv_heads / own, like.size(c.rank - 2), like.size(c.rank - 1)});
  return reduce_to(aten::sum(torch::stable::view(grad, s), {c.rank - 2}), like);
}

// packed tensors are (total, heads, dim) in memory
Tensor empty_like_inputs(const AttentionCall& c, const Tensor& query, const std::vector<int64_t>& shape) {
  if (!c.packed) return aten::empty(query, shape);
  Tensor t = aten::empty(query, {shape[1], shape[0], shape[2]});
  return torch::stable::transpose(t, 0, 1);
}

}  // namespace

std::tuple<Tensor, Tensor> attention_forward(const AttentionBackend& backend, const Tensor& query, const Tensor& key,
                                             const Tensor& value, const AttentionOptions& options) {
  const AttentionCall c = check_attention(query, key, value, options);
  std::vector<int64_t> shape = c.leading();
  shape.push_back(c.params.q_len);
  Tensor lse = aten::empty(query, shape, c.lse_dtype);
  shape.push_back(c.params.v_head_dim);
  Tensor out = empty_like_inputs(c, query, shape);
  backend.forward(query, key, value, options, out, lse);
  return {out, lse};
}

AttentionGradientTuple attention_backward(const AttentionBackend& backend, const Tensor& grad_out,
                                          const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
                                          const Tensor& value, const AttentionOptions& options, const Tensor& out,
                                          const Tensor& lse, int64_t need) {
  const AttentionCall c = check_attention(query, key, value, options);
  const AttentionParams& p = c.params;
  const auto shape = [&](int64_t heads, std::initializer_list<int64_t> rest) {
    std::vector<int64_t> s(c.batch_size, c.batch_size + c.batch_dims);
    if (c.rank >= 3) s.push_back(heads);
    s.insert(s.end(), rest);
    return s;
  };
  const auto lse_like = [&](const char* name, const Tensor& t) {
    check_shape(name, t, shape(c.q_heads, {p.q_len}));
    check_runtime(t.scalar_type() == c.lse_dtype, name, ": expected dtype ", dtype_text(c.lse_dtype), ", got ",
                  dtype_text(t.scalar_type()));
    check_same_device(name, t, "query", query);
  };
  const auto out_like = [&](const char* name, const Tensor& t) {
    check_shape(name, t, shape(c.q_heads, {p.q_len, p.v_head_dim}));
    check_same_dtype(name, t, "query", query);
    check_same_device(name, t, "query", query);
  };
  out_like("grad_out", grad_out);
  out_like("out", out);
  lse_like("lse", lse);
  if (grad_lse) lse_like("grad_lse", *grad_lse);
  check_value(need >= 0 && need < 64, "need: expected a bit set from 0 to 63, got ", need);

  const auto like = [](const Tensor& t) { return aten::empty(t, t.sizes()); };
  AttentionGradients g;
  if (need & 1) g.query = empty_like_inputs(c, query, shape(c.q_heads, {p.q_len, p.head_dim}));
  if (need & 2) g.key = empty_like_inputs(c, query, shape(c.kv_heads, {p.kv_len, p.head_dim}));
  if (need & 4) g.value = empty_like_inputs(c, query, shape(c.kv_heads, {p.kv_len, p.v_head_dim}));
  if ((need & 8) && p.mask == MaskKind::floating) g.attn_mask = like(*options.attn_mask);
  if ((need & 16) && options.sinks) g.sinks = like(*options.sinks);
  if ((need & 32) && options.alibi_slopes) g.alibi_slopes = like(*options.alibi_slopes);
  if (g.any()) backend.backward(grad_out, grad_lse, query, key, value, options, out, lse, g);
  return {g.query ? reduce_to(*g.query, query) : aten::none(query),
          g.key ? reduce_heads(c, *g.key, key) : aten::none(query),
          g.value ? reduce_heads(c, *g.value, value) : aten::none(query),
          g.attn_mask.value_or(aten::none(query)),
          g.sinks.value_or(aten::none(query)),
          g.alibi_slopes.value_or(aten::none(query))};
}

}  // namespace attnjourney
