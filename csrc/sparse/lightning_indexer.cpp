#include "lightning_indexer.h"

#include "attention/attention.h"
#include "core/backend.h"
#include "sparse_checks.h"

namespace attnjourney {
namespace {

IndexerCall check_indexer(const char* query_name, const char* key_name, const IndexerInputs& in) {
  const Tensor &q = in.query, &k = in.key, &w = in.weights;
  IndexerCall c;
  IndexerParams& p = c.params;
  check_dim(query_name, q, 4);
  check_floating(query_name, q);
  check_same_dtype(key_name, k, query_name, q);
  check_same_device(key_name, k, query_name, q);
  c.dtype = q.scalar_type();
  c.score_dtype = c.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  c.batch = q.size(0), p.heads = q.size(1), p.q_len = q.size(2), p.head_dim = q.size(3);
  check_value(p.head_dim > 0, query_name, ": expected a head_dim (last dimension) of at least 1, got shape ",
              shape_text(q));
  check_dim(key_name, k, 3);
  p.kv_len = k.size(1);
  check_shape(key_name, k, {c.batch, p.kv_len, p.head_dim}, "(batch, kv_len, head_dim)");
  check_dtype(dtype_of(w) == c.dtype || dtype_of(w) == c.score_dtype, "weights", w, "dtype ",
              OrFloat32{c.dtype, query_name});
  check_shape("weights", w, {c.batch, p.heads, p.q_len}, "(batch, heads, q_len)");
  check_same_device("weights", w, query_name, q);
  check_value(extent(c.batch, p.heads, p.q_len, p.head_dim) <= most_numbers && p.kv_len <= INT32_MAX, query_name,
              ": expected at most 2^31 - 1 keys and at most 2^56 numbers, got shapes ", shape_text(q), " and ",
              shape_text(k));
  p.scale = check_scale(in.scale, p.head_dim);
  return c;
}

std::vector<int64_t> row_shape(const IndexerCall& c) { return {c.batch, c.params.q_len}; }

}  // namespace

std::vector<Tensor> lightning_indexer(const Backend& backend, Arguments& arguments) {
  IndexerInputs in{.query = arguments.tensor(), .key = arguments.tensor(), .weights = arguments.tensor()};
  const int64_t topk = arguments.integer();
  const bool is_causal = arguments.flag();
  const int64_t causal_alignment = arguments.integer();
  const OptionalTensor key_lengths = arguments.optional_tensor();
  in.scale = arguments.number();
  IndexerCall c = check_indexer("query", "key", in);
  check_value(topk >= 1 && topk <= INT32_MAX && extent(c.batch, c.params.q_len, topk) <= most_numbers,
              "topk: expected a number from 1 to 2^31 - 1, at most 2^56 indices in all, got ", topk);
  check_alignment(causal_alignment);
  check_lengths("key_lengths", key_lengths, c.batch, in.query);
  c.params.topk = topk, c.params.causal = is_causal, c.params.bottom_right = causal_alignment == 1;
  const std::vector<int64_t> shape = {c.batch, c.params.q_len, topk};
  const IndexerResults results{.indices = aten::empty(in.query, shape, ScalarType::Int),
                               .scores = aten::empty(in.query, shape, c.score_dtype)};
  backend.indexer.topk(c, in, key_lengths, results);
  return {results.indices, results.scores};
}

std::vector<Tensor> lightning_indexer_loss_forward(const Backend& backend, Arguments& arguments) {
  IndexerInputs in{.query = arguments.tensor(), .key = arguments.tensor(), .weights = arguments.tensor()};
  IndexerTarget target{.query = arguments.tensor(), .key = arguments.tensor(), .indices = arguments.tensor()};
  in.scale = arguments.number();
  const std::optional<double> scale = arguments.optional_number();
  const bool enable_gqa = arguments.flag();
  const IndexerCall c = check_indexer("index_query", "index_key", in);
  const IndexerParams& p = c.params;
  const Tensor &q = target.query, &k = target.key;
  check_dim("query", q, 4);
  check_dim("key", k, 4);
  for (const auto& [name, t] : {std::pair{"query", &q}, std::pair{"key", &k}}) {
    check_same_dtype(name, *t, "index_query", in.query);
    check_same_device(name, *t, "index_query", in.query);
  }
  const int64_t head_dim = q.size(3);
  check_value(head_dim > 0, "query: expected a head_dim (last dimension) of at least 1, got shape ", shape_text(q));
  check_shape("query", q, {c.batch, q.size(1), p.q_len, head_dim}, "(batch, q_heads, q_len, head_dim)");
  check_shape("key", k, {c.batch, k.size(1), p.kv_len, head_dim}, "(batch, kv_heads, kv_len, head_dim)");
  check_grouped_heads(q, k, enable_gqa);
  check_indices(target.indices, false, c.batch, 1, p.q_len, in.query);
  target.scale = check_scale(scale, head_dim);
  const Tensor loss = aten::empty(in.query, row_shape(c), c.score_dtype);
  const Tensor grad_scores = aten::empty(in.query, target.indices.sizes(), c.score_dtype);
  backend.indexer.loss(c, in, target, loss, grad_scores);
  return {loss, grad_scores};
}

std::vector<Tensor> lightning_indexer_loss_backward(const Backend& backend, Arguments& arguments) {
  const Tensor grad_loss = arguments.tensor();
  IndexerInputs in{.query = arguments.tensor(), .key = arguments.tensor(), .weights = arguments.tensor()};
  const Tensor indices = arguments.tensor(), grad_scores = arguments.tensor();
  in.scale = arguments.number();
  const int64_t need = arguments.integer();
  const IndexerCall c = check_indexer("index_query", "index_key", in);
  check_value(need >= 0 && need < 8, "need: expected a bit set from 0 to 7, got ", need);
  check_indices(indices, false, c.batch, 1, c.params.q_len, in.query);
  const std::vector<int64_t> shape(indices.sizes().begin(), indices.sizes().end());
  for (const auto& [name, t, want] :
       {std::tuple{"grad_loss", &grad_loss, row_shape(c)}, {"grad_scores", &grad_scores, shape}}) {
    check_tensor(has_shape(*t, want), name, *t, ": expected shape ", list_text(want), ", got ", shape_text(*t));
    check_dtype(dtype_of(*t) == c.score_dtype, name, *t, "dtype ", dtype_text(c.score_dtype));
    check_same_device(name, *t, "index_query", in.query);
  }
  IndexerGradients g;
  const auto wanted = [&](int64_t bit, const Tensor& like) {
    return need >> bit & 1 ? OptionalTensor(aten::empty(like, like.sizes())) : std::nullopt;
  };
  g.query = wanted(0, in.query), g.key = wanted(1, in.key), g.weights = wanted(2, in.weights);
  if (g.query || g.key || g.weights)
    backend.indexer.loss_backward(c, in, indices, aten::contiguous(grad_loss), aten::contiguous(grad_scores), g);
  std::vector<Tensor> results;
  for (const OptionalTensor* t : {&g.query, &g.key, &g.weights}) results.push_back(*t ? **t : aten::none(in.query));
  return results;
}

}  // namespace attnjourney
