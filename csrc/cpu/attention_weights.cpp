// CPU operators _attention_weights and _block_attention_weights: exp(score - lse) for chosen rows and heads.
#include <algorithm>

#include "../attention_boxed.h"
#include "block_lists.h"
#include "plan.h"
#include "threads.h"

namespace attnjourney {
namespace {

using Operators = AttentionOperators<cpu_attention>;

// one run of neighbouring rows
struct Run {
  int64_t first, count, place;  // place: where it goes among the chosen ones
};

// none goes past a multiple of `border`
std::vector<Run> runs_of(const std::vector<int64_t>& rows, int64_t longest, int64_t border) {
  std::vector<Run> runs;
  for (size_t i = 0; i < rows.size(); i++) {
    if (!runs.empty() && runs.back().first + runs.back().count == rows[i] && runs.back().count < longest &&
        rows[i] % border != 0)
      runs.back().count++;
    else
      runs.push_back({rows[i], 1, static_cast<int64_t>(i)});
  }
  return runs;
}

std::vector<int64_t> chosen(const char* name, const Tensor& t, int64_t size) {
  check_runtime(t.scalar_type() == ScalarType::Long, name, ": expected dtype torch.int64, got ",
                dtype_text(t.scalar_type()));
  check_dim(name, t, 1);
  std::vector<int64_t> x = index_values(t);
  for (int64_t i : x) check_value(i >= 0 && i < size, name, ": expected numbers from 0 to ", size - 1, ", got ", i);
  return x;
}

Tensor weights(const Tensor& query, const Tensor& key, const Tensor& lse, const Tensor& rows, const Tensor& heads,
               const AttentionOptions& options) {
  const Tensor q = aten::rows_contiguous(query), k = aten::rows_contiguous(key);
  AttentionCall c = check_attention(q, k, k, options);
  AttentionParams& p = c.params;
  const std::vector<int64_t> row_list = chosen("rows", rows, p.q_len), head_list = chosen("heads", heads, c.q_heads);
  std::vector<int64_t> shape = c.leading();
  shape.push_back(p.q_len);
  bool fits = lse.dim() == static_cast<int64_t>(shape.size());
  for (size_t d = 0; fits && d < shape.size(); d++) fits = lse.size(static_cast<int64_t>(d)) == shape[d];
  check_value(fits, "lse: expected one number for each row of query, got shape ", shape_text(lse));
  check_runtime(lse.scalar_type() == c.lse_dtype, "lse: expected dtype ", dtype_text(c.lse_dtype), ", got ",
                dtype_text(lse.scalar_type()));

  const int64_t n_rows = static_cast<int64_t>(row_list.size()), n_heads = static_cast<int64_t>(head_list.size());
  shape.pop_back();
  if (c.rank >= 3) shape.back() = n_heads;
  shape.insert(shape.end(), {n_rows, p.kv_len});
  Tensor out = aten::empty(query, shape);
  if (out.numel() == 0) return out;
  p.out_row = p.kv_len;
  const Tensor l = aten::contiguous(lse);
  const Sequences sequences(c, options);
  const std::vector<double> slopes = per_head(options.alibi_slopes, c.batch, c.q_heads);
  const HeadWalk queries(c, c.query, q), keys(c, c.key, k), masks(c, c.mask, options.attn_mask.value_or(q));
  const BlockLists blocks(c, options);
  char *base = static_cast<char*>(out.data_ptr()), *lses = static_cast<char*>(l.data_ptr());

  const AttentionKernels& kernel = kernels_for(c);
  const std::vector<Run> runs = runs_of(row_list, kernel.backward_tile, std::max<int64_t>(1, p.block_size));
  const int64_t n_runs = static_cast<int64_t>(runs.size()), items = c.batch * n_heads * n_runs;
  const double flops = 2.0 * static_cast<double>(out.numel()) * static_cast<double>(p.head_dim);
  run_queue(items, thread_count(items, flops), kernel.weights_space(p), [&](int64_t i, void* scratch) {
    const Run& run = runs[static_cast<size_t>(i % n_runs)];
    const int64_t b = i / n_runs / n_heads, place = i / n_runs % n_heads, head = head_list[static_cast<size_t>(place)];
    const AttentionParams own = sequences.params(b);
    HeadPointers h;
    h.query = queries.at(b, head);
    h.key = keys.at(b, head);
    h.mask = options.attn_mask ? masks.at(b, head) : blocks.at(b, head);
    if (options.alibi_slopes) h.slope = slopes[static_cast<size_t>(b * c.q_heads + head)];
    h.lse = lse_at(c, lses, b, head, 0);
    const int64_t row_bytes = p.kv_len * item_size(c.dtype);
    char* at = base + ((b * n_heads + place) * n_rows + run.place) * row_bytes;
    h.out = at;
    const int64_t used = std::clamp<int64_t>(own.q_len - run.first, 0, run.count);
    if (used) kernel.weights(own, h, run.first, used, scratch);
    std::fill(at + used * row_bytes, at + run.count * row_bytes, char{0});
  });
  return out;
}

Tensor dense_weights(const Tensor& query, const Tensor& key, const Tensor& lse, const Tensor& rows, const Tensor& heads,
                     OptionalTensor attn_mask, bool is_causal, std::optional<double> scale, bool enable_gqa,
                     int64_t causal_alignment, std::vector<int64_t> window_size, int64_t prefix_length,
                     OptionalTensor key_lengths, OptionalTensor query_lengths, double softcap, OptionalTensor sinks,
                     OptionalTensor alibi_slopes, OptionalTensor) {
  return weights(
      query, key, lse, rows, heads,
      {attn_mask, 0, is_causal, scale, enable_gqa, std::nullopt, causal_alignment, Operators::window_of(window_size),
       prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes, std::nullopt, std::nullopt});
}

Tensor block_weights(const Tensor& query, const Tensor& key, const Tensor& lse, const Tensor& rows, const Tensor& heads,
                     const Tensor& block_offsets, const Tensor& block_index, const Tensor& block_partial,
                     const Tensor& block_elements, bool is_causal, std::optional<double> scale, bool enable_gqa,
                     int64_t causal_alignment, std::vector<int64_t> window_size, int64_t prefix_length,
                     OptionalTensor key_lengths, OptionalTensor query_lengths, double softcap, OptionalTensor sinks,
                     OptionalTensor alibi_slopes, OptionalTensor) {
  return weights(
      query, key, lse, rows, heads,
      {std::nullopt, 0, is_causal, scale, enable_gqa, std::nullopt, causal_alignment, Operators::window_of(window_size),
       prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes, std::nullopt, std::nullopt,
       BlockTensors{block_offsets, block_index, block_partial, block_elements}});
}

}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("_attention_weights", TORCH_BOX(&attnjourney::dense_weights));
  m.impl("_block_attention_weights", TORCH_BOX(&attnjourney::block_weights));
}
