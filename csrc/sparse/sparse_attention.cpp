#include "sparse_attention.h"

#include "attention/attention.h"
#include "core/backend.h"
#include "sparse_checks.h"

namespace attnjourney {
namespace {

SparseInputs read_sparse_options(Arguments& arguments, SparseInputs in) {
  in.scale = arguments.optional_number();
  in.enable_gqa = arguments.flag();
  in.is_causal = arguments.flag();
  in.causal_alignment = arguments.integer();
  in.key_lengths = arguments.optional_tensor();
  in.softcap = arguments.number();
  in.sinks = arguments.optional_tensor();
  in.query_block_size = arguments.integer();
  return in;
}

SparseInputs read_sparse_tensors(Arguments& arguments) {
  return {.query = arguments.tensor(),
          .key = arguments.tensor(),
          .value = arguments.tensor(),
          .indices = arguments.tensor(),
          .scale = std::nullopt,
          .key_lengths = std::nullopt,
          .sinks = std::nullopt};
}

std::vector<int64_t> lse_shape(const SparseCall& c) { return {c.batch, c.q_heads, c.params.q_len}; }
std::vector<int64_t> stats_shape(const SparseCall& c) { return {c.batch, c.q_heads, c.params.q_len, 2}; }
std::vector<int64_t> out_shape(const SparseCall& c) {
  return {c.batch, c.q_heads, c.params.q_len, c.params.v_head_dim};
}

void check_like(const char* name, const Tensor& t, const std::vector<int64_t>& shape, ScalarType dtype,
                const Tensor& query) {
  check_tensor(has_shape(t, shape), name, t, ": expected shape ", list_text(shape), ", got ", shape_text(t));
  check_dtype(dtype_of(t) == dtype, name, t, "dtype ", dtype_text(dtype));
  check_same_device(name, t, "query", query);
}

}  // namespace

SparseCall check_sparse_attention(const SparseInputs& in) {
  const Tensor &q = in.query, &k = in.key, &v = in.value, &indices = in.indices;
  SparseCall c;
  SparseParams& p = c.params;
  check_dim("query", q, 4);
  check_floating("query", q);
  for (const auto& [name, t] : {std::pair{"key", &k}, std::pair{"value", &v}}) {
    check_same_dtype(name, *t, "query", q);
    check_same_device(name, *t, "query", q);
    check_dim(name, *t, 4);
  }
  c.dtype = q.scalar_type();
  c.lse_dtype = c.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  c.batch = q.size(0), c.q_heads = q.size(1), c.kv_heads = k.size(1);
  p.q_len = q.size(2), p.kv_len = k.size(2), p.head_dim = q.size(3), p.v_head_dim = v.size(3);
  check_value(p.head_dim > 0, "query: expected a head_dim (last dimension) of at least 1, got shape ", shape_text(q));
  check_value(p.v_head_dim > 0, "value: expected a head_dim (last dimension) of at least 1, got shape ", shape_text(v));
  check_shape("key", k, {c.batch, c.kv_heads, p.kv_len, p.head_dim}, "(batch, kv_heads, kv_len, head_dim)");
  check_shape("value", v, {c.batch, c.kv_heads, p.kv_len, p.v_head_dim}, "(batch, kv_heads, kv_len, v_head_dim)");
  p.group = check_grouped_heads(q, k, in.enable_gqa);
  check_value(in.query_block_size >= 1 && in.query_block_size <= int64_t{1} << 40,
              "query_block_size: expected a number from 1 to 2^40, got ", in.query_block_size);
  p.rows = in.query_block_size;
  c.blocks = (p.q_len + p.rows - 1) / p.rows;
  c.indices_per_head = indices.defined() && indices.dim() == 4;
  check_indices(indices, c.indices_per_head, c.batch, c.kv_heads, c.blocks, q);
  p.index_count = indices.size(indices.dim() - 1);
  check_value(extent(c.batch, c.q_heads, p.q_len, p.head_dim) <= most_numbers &&
                  extent(c.batch, c.q_heads, p.q_len, p.v_head_dim) <= most_numbers && p.kv_len <= INT32_MAX,
              "query, key, value: expected at most 2^31 - 1 keys and at most 2^56 numbers, got shapes ", shape_text(q),
              ", ", shape_text(k), " and ", shape_text(v));
  p.scale = check_scale(in.scale, p.head_dim);
  check_alignment(in.causal_alignment);
  p.causal = in.is_causal, p.bottom_right = in.causal_alignment == 1;
  check_lengths("key_lengths", in.key_lengths, c.batch, q);
  AttentionOptions scores;
  scores.softcap = in.softcap, scores.sinks = in.sinks;
  p.modifier = check_score_options(scores, c.batch, c.q_heads, q);
  return c;
}

std::vector<Tensor> sparse_attention_forward(const Backend& backend, Arguments& arguments) {
  const SparseInputs in = read_sparse_options(arguments, read_sparse_tensors(arguments));
  const SparseCall c = check_sparse_attention(in);
  const SparseResults results{.out = aten::empty(in.query, out_shape(c)),
                              .lse = aten::empty(in.query, lse_shape(c), c.lse_dtype),
                              .stats = aten::empty(in.query, stats_shape(c), c.lse_dtype)};
  backend.sparse.forward(c, in, results);
  return {results.out, results.lse, results.stats};
}

std::vector<Tensor> sparse_attention_backward(const Backend& backend, Arguments& arguments) {
  const Tensor grad_out = arguments.tensor();
  const OptionalTensor grad_lse = arguments.optional_tensor();
  SparseInputs read = read_sparse_tensors(arguments);
  const Tensor out = arguments.tensor(), lse = arguments.tensor(), stats = arguments.tensor();
  const SparseInputs in = read_sparse_options(arguments, std::move(read));
  const int64_t need = arguments.integer();
  const SparseCall c = check_sparse_attention(in);
  check_value(need >= 0 && need < 16, "need: expected a bit set from 0 to 15, got ", need);
  check_like("grad_out", grad_out, out_shape(c), c.dtype, in.query);
  check_like("out", out, out_shape(c), c.dtype, in.query);
  check_like("lse", lse, lse_shape(c), c.lse_dtype, in.query);
  check_like("stats", stats, stats_shape(c), c.lse_dtype, in.query);
  if (grad_lse) check_like("grad_lse", *grad_lse, lse_shape(c), c.lse_dtype, in.query);
  SparseSaved saved{
      .grad_out = aten::rows_contiguous(grad_out),
      .grad_lse = std::nullopt,
      .results = {.out = aten::contiguous(out), .lse = aten::contiguous(lse), .stats = aten::contiguous(stats)}};
  if (grad_lse) saved.grad_lse = aten::contiguous(*grad_lse);
  SparseGradients g;
  const auto wanted = [&](int64_t bit, const Tensor& like) {
    return need >> bit & 1 ? OptionalTensor(aten::empty(like, like.sizes())) : std::nullopt;
  };
  g.query = wanted(0, in.query), g.key = wanted(1, in.key), g.value = wanted(2, in.value);
  if (in.sinks) g.sinks = wanted(3, *in.sinks);
  if (g.query || g.key || g.value || g.sinks) backend.sparse.backward(c, in, saved, g);
  std::vector<Tensor> results;
  for (const OptionalTensor* t : {&g.query, &g.key, &g.value, &g.sinks})
    results.push_back(*t ? **t : aten::none(in.query));
  return results;
}

}  // namespace attnjourney
