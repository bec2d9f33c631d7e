// CPU entry of attention_weights: the weights of chosen rows and heads.
#include <algorithm>

#include "attention_cpu.h"
#include "block_lists.h"
#include "cpu/plan.h"
#include "cpu/threads.h"

namespace attnjourney {
namespace {

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
  std::vector<int64_t> x = index_values(t);
  for (int64_t i : x) check_value(i >= 0 && i < size, name, ": expected numbers from 0 to ", size - 1, ", got ", i);
  return x;
}

}  // namespace

void cpu_attention_weights(const WeightsCall& w, const Tensor& out) {
  AttentionCall& c = w.call;
  AttentionParams& p = c.params;
  const std::vector<int64_t> row_list = chosen("rows", w.rows, p.q_len),
                             head_list = chosen("heads", w.heads, c.q_heads);
  const int64_t n_rows = static_cast<int64_t>(row_list.size()), n_heads = static_cast<int64_t>(head_list.size());
  const AttentionOptions& options = c.args.options;
  if (out.numel() == 0) return;
  p.out_row = p.kv_len;
  const Sequences sequences(c);
  const std::vector<double> slopes = per_head(options.alibi_slopes, c.batch, c.q_heads);
  const HeadWalk queries(c, c.query_map, c.args.query), keys(c, c.key_map, c.args.key),
      masks(c, c.mask_map, options.attn_mask.value_or(c.args.query));
  const BlockLists blocks(c);
  char *base = static_cast<char*>(out.data_ptr()), *lses = static_cast<char*>(w.lse.data_ptr());
  char* const all_stats = w.stats ? static_cast<char*>(w.stats->data_ptr()) : nullptr;

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
    if (all_stats) h.stats = lse_at(c, all_stats, b, head, 0, 2);
    const int64_t row_bytes = p.kv_len * item_size(c.dtype);
    char* at = base + ((b * n_heads + place) * n_rows + run.place) * row_bytes;
    h.out = at;
    const int64_t used = std::clamp<int64_t>(own.q_len - run.first, 0, run.count);
    if (used) kernel.weights(own, h, run.first, used, scratch);
    std::fill(at + used * row_bytes, at + run.count * row_bytes, char{0});
  });
}

}  // namespace attnjourney
