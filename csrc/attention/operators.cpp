#include "operators.h"

#include "core/backend.h"

namespace attnjourney {
namespace {

void check_shape(const char* name, const Tensor& t, const std::vector<int64_t>& want) {
  check_tensor(has_shape(t, want), name, t, ": expected shape ", list_text(want), ", got ", shape_text(t));
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
  explicit Like(const AttentionCall& c) : c_(c), query_(c.args.query) {}
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
  void lse(const char* name, const Tensor& t) const { of_rows(name, t, {c_.params.q_len}); }
  void stats(const Tensor& t) const { of_rows("stats", t, {c_.params.q_len, 2}); }
  void input(const char* name, const OptionalTensor& t, const char* like_name, const OptionalTensor& like) const {
    if (!t) return;
    check_value(like.has_value(), name, ": expected None where ", like_name, " is None, got shape ", shape_text(*t));
    const auto s = like->sizes();
    check_shape(name, *t, {s.begin(), s.end()});
    check_same_dtype(name, *t, like_name, *like);
    check_same_device(name, *t, "query", query_);
  }
  void tangents(const AttentionTangents& t) const {
    const AttentionOptions& o = c_.args.options;
    input("query_tangent", t.query, "query", query_);
    input("key_tangent", t.key, "key", c_.args.key);
    input("value_tangent", t.value, "value", c_.args.value);
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
  // of lse's dtype, (..., q_heads, numbers...)
  void of_rows(const char* name, const Tensor& t, std::initializer_list<int64_t> numbers) const {
    check_shape(name, t, shape(c_.q_heads, numbers));
    check_dtype(dtype_of(t) == c_.lse_dtype, name, t, "dtype ", dtype_text(c_.lse_dtype));
    check_same_device(name, t, "query", query_);
  }

  const AttentionCall& c_;
  const Tensor& query_;
};

// ---- arguments ----

// packed tensors (total, heads, dim) are seen as (heads, total, dim)
void swap(const char* name, Tensor& t) {
  check_dim(name, t, 3);
  t = torch::stable::transpose(t, 0, 1);
}
void swap(const char* name, OptionalTensor& t) {
  if (t) swap(name, *t);
}

void swap_inputs(AttentionArgs& args) {
  for (const auto& [name, t] : {std::pair{"query", args.query}, {"key", args.key}, {"value", args.value}})
    check_dim(name, t, 3);
  swap("query", args.query), swap("key", args.key), swap("value", args.value);
}

AttentionArgs read_inputs(Arguments& in, MaskArguments kind) {
  AttentionArgs args{.query = in.tensor(), .key = in.tensor(), .value = in.tensor(), .options = {}};
  read_mask(in, kind, args.options);
  return args;
}

// those of the inputs
void read_tangents(Arguments& in, MaskArguments kind, AttentionTangents& t) {
  t.query = in.optional_tensor(), t.key = in.optional_tensor(), t.value = in.optional_tensor();
  if (kind == MaskArguments::dense) t.attn_mask = in.optional_tensor();
  t.sinks = in.optional_tensor(), t.alibi_slopes = in.optional_tensor();
}

void swap_tangents(AttentionTangents& t) {
  swap("query_tangent", t.query), swap("key_tangent", t.key), swap("value_tangent", t.value);
  swap("grad_out_tangent", t.grad_out), swap("out_tangent", t.out);
}

// checks the call, allocates its results and has them written
AttentionResults forward(const AttentionBackend& backend, AttentionArgs args) {
  AttentionCall c = check_attention(std::move(args));
  std::vector<int64_t> shape = c.leading();
  shape.push_back(c.params.q_len);
  Tensor lse = aten::empty(c.args.query, shape, c.lse_dtype);
  shape.push_back(2);
  Tensor stats = aten::empty(c.args.query, shape, c.lse_dtype);
  shape.back() = c.params.v_head_dim;
  AttentionResults results{
      .out = empty_like_inputs(c, c.args.query, shape), .lse = std::move(lse), .stats = std::move(stats)};
  backend.forward(c, results);
  if (c.packed) results.out = torch::stable::transpose(results.out, 0, 1);
  return results;
}

// ---- gradients ----

enum Need { need_query = 1, need_key = 2, need_value = 4, need_mask = 8, need_sinks = 16, need_slopes = 32 };

// `need` with a bit for a mask, which only dense calls have
int64_t checked_need(int64_t need, bool dense) {
  const int64_t end = dense ? 64 : 32;
  check_value(need >= 0 && need < end, "need: expected a bit set from 0 to ", end - 1, ", got ", need);
  return dense ? need : (need & 7) | (need & 24) << 1;
}

AttentionGradients allocate(const AttentionCall& c, const Like& like, int64_t need) {
  const AttentionParams& p = c.params;
  const auto& [query, key, value, options, fp8] = c.args;
  const auto empty_like = [](const OptionalTensor& t) { return t ? OptionalTensor(aten::empty(*t, t->sizes())) : t; };
  AttentionGradients g;
  if (need & need_query) g.query = empty_like_inputs(c, query, like.shape(c.q_heads, {p.q_len, p.head_dim}));
  if (need & need_key) g.key = empty_like_inputs(c, query, like.shape(c.kv_heads, {p.kv_len, p.head_dim}));
  if (need & need_value) g.value = empty_like_inputs(c, query, like.shape(c.kv_heads, {p.kv_len, p.v_head_dim}));
  if ((need & need_mask) && p.mask == MaskKind::floating) g.attn_mask = empty_like(options.attn_mask);
  if (need & need_sinks) g.sinks = empty_like(options.sinks);
  if (need & need_slopes) g.alibi_slopes = empty_like(options.alibi_slopes);
  return g;
}

// In the shapes of what they belong to; shape (0,) where none is needed.
std::vector<Tensor> gradients_of_inputs(const AttentionCall& c, const AttentionGradients& g, bool dense) {
  const auto& [query, key, value, options, fp8] = c.args;
  std::vector<Tensor> all = {g.query ? reduce_to(*g.query, query) : aten::none(query),
                             g.key ? reduce_heads(c, *g.key, key) : aten::none(query),
                             g.value ? reduce_heads(c, *g.value, value) : aten::none(query)};
  if (c.packed)
    for (Tensor& t : all)
      if (t.dim() == 3) t = torch::stable::transpose(t, 0, 1);
  if (dense) all.push_back(g.attn_mask.value_or(aten::none(query)));
  all.push_back(g.sinks.value_or(aten::none(query)));
  all.push_back(g.alibi_slopes.value_or(aten::none(query)));
  return all;
}

// the backward, or with `tangents` its derivative in their direction
std::vector<Tensor> backward(const AttentionBackend& backend, AttentionCall& c, AttentionSaved saved,
                             const AttentionTangents* tangents, int64_t need, bool dense) {
  const Like like(c);
  like.out("grad_out", saved.grad_out);
  like.out("out", saved.out);
  like.lse("lse", saved.lse);
  like.stats(saved.stats);
  if (saved.grad_lse) like.lse("grad_lse", *saved.grad_lse);
  if (tangents) like.tangents(*tangents);
  const AttentionGradients gradients = allocate(c, like, checked_need(need, dense));
  saved.make_dense();
  const auto all = gradients.all();
  if (std::any_of(all.begin(), all.end(), [](const OptionalTensor* g) { return g->has_value(); })) {
    if (tangents)
      backend.backward_jvp(c, saved, *tangents, gradients);
    else
      backend.backward(c, saved, gradients);
  }
  return gradients_of_inputs(c, gradients, dense);
}

std::vector<Tensor> backward(const AttentionBackend& backend, Arguments& in, MaskArguments kind, bool derivative) {
  const Tensor grad_out = in.tensor();
  const OptionalTensor grad_lse = in.optional_tensor();
  AttentionArgs args = read_inputs(in, kind);
  const Tensor out = in.tensor(), lse = in.tensor(), stats = in.tensor();
  AttentionSaved saved{.grad_out = grad_out, .grad_lse = grad_lse, .out = out, .lse = lse, .stats = stats};
  AttentionTangents tangents;
  if (derivative) {
    tangents.out = in.tensor(), tangents.lse = in.tensor();
    tangents.grad_out = in.optional_tensor(), tangents.grad_lse = in.optional_tensor();
    read_tangents(in, kind, tangents);
  }
  read_options(in, kind, args.options);
  const int64_t need = in.integer();
  if (kind == MaskArguments::packed) {
    swap_inputs(args);
    swap("grad_out", saved.grad_out), swap("out", saved.out);
    if (derivative) swap_tangents(tangents);
  }
  AttentionCall c = check_attention(std::move(args));
  return backward(backend, c, std::move(saved), derivative ? &tangents : nullptr, need, kind == MaskArguments::dense);
}

// ---- weights ----

void check_index(const char* name, const Tensor& t, const Tensor& query) {
  check_dtype(dtype_of(t) == ScalarType::Long, name, t, "dtype torch.int64");
  check_dim(name, t, 1);
  check_same_device(name, t, "query", query);
}

// of attention_weights
void check_lse(const AttentionCall& c, const Tensor& lse, const OptionalTensor& stats) {
  std::vector<int64_t> shape = c.leading();
  shape.push_back(c.params.q_len);
  check_tensor(has_shape(lse, shape), "lse", lse, ": expected one number for each row of query, got shape ",
               shape_text(lse));
  check_dtype(dtype_of(lse) == c.lse_dtype, "lse", lse, "dtype ", dtype_text(c.lse_dtype));
  check_same_device("lse", lse, "query", c.args.query);
  if (stats) Like(c).stats(*stats);
}

}  // namespace

void AttentionSaved::make_dense() {
  grad_out = aten::rows_contiguous(grad_out);
  out = aten::rows_contiguous(out);
  lse = aten::contiguous(lse);
  stats = aten::contiguous(stats);
  if (grad_lse) grad_lse = aten::contiguous(*grad_lse);
}

std::vector<Tensor> attention_forward(const Backend& backend, Arguments& in, MaskArguments kind) {
  AttentionArgs args = read_inputs(in, kind);
  read_options(in, kind, args.options);
  if (kind == MaskArguments::packed) swap_inputs(args);
  AttentionResults results = forward(backend.attention, std::move(args));
  return {std::move(results.out), std::move(results.lse), std::move(results.stats)};
}

std::tuple<Tensor, Tensor> paged_attention(const Backend& backend, Arguments& in) {
  AttentionArgs args = read_inputs(in, MaskArguments::paged);
  read_options(in, MaskArguments::paged, args.options, false);
  swap("query", args.query);
  AttentionResults results = forward(backend.attention, std::move(args));
  return {std::move(results.out), std::move(results.lse)};
}

std::vector<Tensor> attention_backward(const Backend& backend, Arguments& in, MaskArguments kind) {
  return backward(backend.attention, in, kind, false);
}

std::vector<Tensor> attention_backward_jvp(const Backend& backend, Arguments& in, MaskArguments kind) {
  return backward(backend.attention, in, kind, true);
}

std::tuple<Tensor, Tensor> attention_jvp(const Backend& backend, Arguments& in, MaskArguments kind) {
  AttentionArgs args = read_inputs(in, kind);
  const Tensor out = in.tensor(), lse = in.tensor(), stats = in.tensor();
  AttentionResults results{.out = out, .lse = lse, .stats = stats};
  AttentionTangents tangents;
  read_tangents(in, kind, tangents);
  read_options(in, kind, args.options);
  if (kind == MaskArguments::packed) {
    swap_inputs(args);
    swap("out", results.out);
    swap_tangents(tangents);
  }
  AttentionCall c = check_attention(std::move(args));
  const Like like(c);
  like.out("out", results.out);
  like.lse("lse", results.lse);
  like.stats(results.stats);
  like.tangents(tangents);
  results.out = aten::rows_contiguous(results.out);
  results.lse = aten::contiguous(results.lse);
  results.stats = aten::contiguous(results.stats);
  const Tensor& query = c.args.query;
  tangents.lse = aten::empty(query, like.shape(c.q_heads, {c.params.q_len}), c.lse_dtype);
  tangents.out = empty_like_inputs(c, query, like.shape(c.q_heads, {c.params.q_len, c.params.v_head_dim}));
  backend.attention.jvp(c, results, tangents);
  return {c.packed ? torch::stable::transpose(*tangents.out, 0, 1) : *tangents.out, *tangents.lse};
}

Tensor attention_weights(const Backend& backend, Arguments& in, MaskArguments kind) {
  const Tensor query = in.tensor(), key = in.tensor(), lse = in.tensor();
  const OptionalTensor given_stats = in.optional_tensor();
  const Tensor rows = in.tensor(), heads = in.tensor();
  AttentionArgs args{.query = query, .key = key, .value = key, .options = {}};
  read_mask(in, kind, args.options);
  read_options(in, kind, args.options, false);
  AttentionCall c = check_attention(std::move(args));
  check_index("rows", rows, query);
  check_index("heads", heads, query);
  check_lse(c, lse, given_stats);
  std::vector<int64_t> shape = c.leading();
  if (c.rank >= 3) shape.back() = heads.size(0);
  shape.insert(shape.end(), {rows.size(0), c.params.kv_len});
  const Tensor out = aten::empty(query, shape);
  OptionalTensor stats;
  if (given_stats) stats = aten::contiguous(*given_stats);
  backend.attention.weights({.call = c, .lse = aten::contiguous(lse), .stats = stats, .rows = rows, .heads = heads},
                            out);
  return out;
}

}  // namespace attnjourney
