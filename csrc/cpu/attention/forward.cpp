// CPU entry of attention's forward: the walk over batch, heads and work items.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention_cpu.h"
#include "cpu/plan.h"
#include "cpu/threads.h"
#include "few_rows.h"

namespace attnjourney {

Dropout dropout_of(const AttentionOptions& options) {
  if (options.dropout_p == 0) return {};
  Dropout d = Dropout::from(
      options.dropout_p, static_cast<uint64_t>(*static_cast<const int64_t*>(options.dropout_seed->const_data_ptr())));
  d.first_row = options.origin.row, d.first_key = options.origin.key;
  return d;
}

void clear_rows(const AttentionCall& c, const Sequences& sequences, const HeadWalk& walk, int64_t heads,
                const Tensor& t) {
  const int64_t row = stride_of(t, c.rank - 2) * item_size(t.scalar_type());
  const int64_t width = t.size(c.rank - 1) * item_size(t.scalar_type());
  sequences.unused_rows([&](int64_t b, int64_t first, int64_t count) {
    for (int64_t h = 0; h < heads; h++)
      for (int64_t r = first; r < first + count; r++)
        std::memset(static_cast<char*>(walk.at(b, h)) + r * row, 0, static_cast<size_t>(width));
  });
}

void clear_numbers(const AttentionCall& c, const Sequences& sequences, const Tensor& t, int64_t numbers) {
  const int64_t row = numbers * item_size(c.lse_dtype);
  char* const base = static_cast<char*>(t.mutable_data_ptr());
  sequences.unused_rows([&](int64_t b, int64_t first, int64_t count) {
    for (int64_t h = 0; h < c.q_heads; h++)
      std::memset(lse_at(c, base, b, h, 0, numbers) + first * row, 0, static_cast<size_t>(count * row));
  });
}

void cpu_attention_forward(AttentionCall& c, const AttentionResults& results) {
  const auto& [out, lse, stats] = results;
  AttentionParams& p = c.params;
  if (c.q_heads * p.q_len == 0) return;
  p.dropout = dropout_of(c.args.options);
  p.out_row = stride_of(out, c.rank - 2);
  const Sequences sequences(c);
  const HeadInputs heads(c, sequences, out, lse, stats);
  char* lses = static_cast<char*>(lse.mutable_data_ptr());

  clear_rows(c, sequences, heads.out(), c.q_heads, out);
  clear_numbers(c, sequences, stats, 2);
  sequences.unused_rows([&](int64_t b, int64_t first, int64_t count) {
    for (int64_t h = 0; h < c.q_heads; h++) {
      void* at = lse_at(c, lses, b, h, 0);
      for (int64_t r = first; r < first + count; r++)
        if (c.lse_dtype == ScalarType::Double)
          static_cast<double*>(at)[r] = -INFINITY;
        else
          static_cast<float*>(at)[r] = -INFINITY;
    }
  });

  const std::vector<int64_t> few = few_row_items(c, sequences);
  if (!few.empty()) forward_few_rows(c, sequences, few, heads);
  if (static_cast<int64_t>(few.size()) == c.batch) return;
  const ForwardPlan plan = plan_forward(c, sequences, few);
  const int64_t space = plan.kernel->forward_space(p, std::min(plan.rows, p.q_len));
  run_queue(plan.items, plan.threads, space, [&](int64_t item, void* scratch) {
    const auto [b, head, first, rows] = plan.at(item, sequences);
    if (rows) plan.kernel->forward(sequences.params(b), heads.at(b, head), first, rows, scratch);
  });
}

}  // namespace attnjourney
