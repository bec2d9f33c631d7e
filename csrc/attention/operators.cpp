#include "operators.h"

namespace attnjourney {
namespace {

void check_shape(const char* name, const Tensor& t, const std::vector<int64_t>& want) {
  bool ok = t.dim() == static_cast<int64_t>(want.size());
  for (size_t d = 0; ok && d < want.size(); d++) ok = t.size(static_cast<int64_t>(d)) == want[d];
  check_value(ok, name, ": expected shape ", list_text(want), ", got ", shape_text(t));
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

// Checks of tensors that are like the results, (..., heads, q_len, v_head_dim) and (..., heads, q_len), or like an
// input.
class Like {
 public:
  Like(const AttentionCall& c, const Tensor& query) : c_(c), query_(query) {}
  std::vector<int64_t> shape(int64_t heads, std::initializer_list<int64_t> rest) const {
    std::vector<int64_t> s(c_.batch_size, c_.batch_size + c_.batch_dims);
    if (c_.rank >= 3) s.push_back(heads);
    s.insert(s.end(), rest);
    return s;
  }
  void out(const char* name, const Tensor& t) const {
    check_shape(name, t, shape(c_.q_heads, {c_.params.q_len, c_.params.v_head_dim}));
    check_same_dtype(name, t, "query", query_);
    check_same_device(name, t, "query", query_);
  }
  void lse(const char* name, const Tensor& t) const {
    check_shape(name, t, shape(c_.q_heads, {c_.params.q_len}));
    check_runtime(t.scalar_type() == c_.lse_dtype, name, ": expected dtype ", dtype_text(c_.lse_dtype), ", got ",
                  dtype_text(t.scalar_type()));
    check_same_device(name, t, "query", query_);
  }
  void input(const char* name, const OptionalTensor& t, const char* like_name, const OptionalTensor& like) const {
    if (!t) return;
    check_value(like.has_value(), name, ": expected None where ", like_name, " is None, got shape ", shape_text(*t));
    const auto s = like->sizes();
    check_shape(name, *t, {s.begin(), s.end()});
    check_same_dtype(name, *t, like_name, *like);
    check_same_device(name, *t, "query", query_);
  }
  void tangents(const AttentionTangents& t, const Tensor& key, const Tensor& value, const AttentionOptions& o) const {
    input("query_tangent", t.query, "query", query_);
    input("key_tangent", t.key, "key", key);
    input("value_tangent", t.value, "value", value);
    input("attn_mask_tangent", t.attn_mask, "attn_mask", o.attn_mask);
    check_value(!t.attn_mask || c_.params.mask == MaskKind::floating,
                "attn_mask_tangent: expected None beside a mask of dtype torch.bool");
    input("sinks_tangent", t.sinks, "sinks", o.sinks);
    input("alibi_slopes_tangent", t.alibi_slopes, "alibi_slopes", o.alibi_slopes);
    if (t.grad_out) out("grad_out_tangent", *t.grad_out);
    if (t.grad_lse) lse("grad_lse_tangent", *t.grad_lse);
    if (t.out) out("out_tangent", *t.out);
    if (t.lse) lse("lse_tangent", *t.lse);
  }

 private:
  const AttentionCall& c_;
  const Tensor& query_;
};

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

std::tuple<Tensor, Tensor> attention_jvp(const AttentionBackend& backend, const Tensor& query, const Tensor& key,
                                         const Tensor& value, const AttentionOptions& options, const Tensor& out,
                                         const Tensor& lse, AttentionTangents tangents) {
  const AttentionCall c = check_attention(query, key, value, options);
  const Like like(c, query);
  like.out("out", out);
  like.lse("lse", lse);
  like.tangents(tangents, key, value, options);
  tangents.lse = aten::empty(query, like.shape(c.q_heads, {c.params.q_len}), c.lse_dtype);
  tangents.out = empty_like_inputs(c, query, like.shape(c.q_heads, {c.params.q_len, c.params.v_head_dim}));
  backend.jvp(query, key, value, options, out, lse, tangents);
  return {*tangents.out, *tangents.lse};
}

AttentionGradientTuple attention_backward(const AttentionBackend& backend, const Tensor& grad_out,
                                          const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
                                          const Tensor& value, const AttentionOptions& options, const Tensor& out,
                                          const Tensor& lse, int64_t need, const AttentionTangents* tangents) {
  const AttentionCall c = check_attention(query, key, value, options);
  const AttentionParams& p = c.params;
  const Like like(c, query);
  like.out("grad_out", grad_out);
  like.out("out", out);
  like.lse("lse", lse);
  if (grad_lse) like.lse("grad_lse", *grad_lse);
  if (tangents) like.tangents(*tangents, key, value, options);
  check_value(need >= 0 && need < 64, "need: expected a bit set from 0 to 63, got ", need);

  const auto empty_like = [](const Tensor& t) { return aten::empty(t, t.sizes()); };
  AttentionGradients g;
  if (need & 1) g.query = empty_like_inputs(c, query, like.shape(c.q_heads, {p.q_len, p.head_dim}));
  if (need & 2) g.key = empty_like_inputs(c, query, like.shape(c.kv_heads, {p.kv_len, p.head_dim}));
  if (need & 4) g.value = empty_like_inputs(c, query, like.shape(c.kv_heads, {p.kv_len, p.v_head_dim}));
  if ((need & 8) && p.mask == MaskKind::floating) g.attn_mask = empty_like(*options.attn_mask);
  if ((need & 16) && options.sinks) g.sinks = empty_like(*options.sinks);
  if ((need & 32) && options.alibi_slopes) g.alibi_slopes = empty_like(*options.alibi_slopes);
  if (g.any()) {
    if (tangents)
      backend.backward_jvp(grad_out, grad_lse, query, key, value, options, out, lse, *tangents, g);
    else
      backend.backward(grad_out, grad_lse, query, key, value, options, out, lse, g);
  }
  return {g.query ? reduce_to(*g.query, query) : aten::none(query),
          g.key ? reduce_heads(c, *g.key, key) : aten::none(query),
          g.value ? reduce_heads(c, *g.value, value) : aten::none(query),
          g.attn_mask.value_or(aten::none(query)),
          g.sinks.value_or(aten::none(query)),
          g.alibi_slopes.value_or(aten::none(query))};
}

}  // namespace attnjourney
