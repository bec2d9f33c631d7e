// CPU entry of attention's jvp: the walk over batch, heads and work items of the forward.
#include <algorithm>

#include "attention_cpu.h"
#include "cpu/plan.h"
#include "cpu/threads.h"
#include "head_inputs.h"
#include "tangents.h"

namespace attnjourney {

void cpu_attention_jvp(AttentionCall& c, const AttentionResults& results, const AttentionTangents& tangents) {
  AttentionParams& p = c.params;
  if (c.q_heads * p.q_len == 0) return;
  p.dropout = dropout_of(c.args.options);
  p.out_row = stride_of(results.out, c.rank - 2);
  const Sequences sequences(c);
  const HeadInputs heads(c, sequences, results.out, results.lse, results.stats);
  const HeadMap written_map = head_map(c, *tangents.out, c.q_heads);
  const HeadWalk written(c, written_map, *tangents.out);
  const Tangents directions(c, tangents);

  clear_rows(c, sequences, written, c.q_heads, *tangents.out);
  clear_numbers(c, sequences, *tangents.lse, 1);

  const ForwardPlan plan = plan_forward(c, sequences);
  run_queue(plan.items, plan.threads, plan.kernel->jvp_space(p, std::min(plan.rows, p.q_len)),
            [&](int64_t item, void* scratch) {
              const auto [b, head, first, rows] = plan.at(item, sequences);
              if (!rows) return;
              plan.kernel->jvp(sequences.params(b), heads.at(b, head), directions.at(sequences, b, head), first, rows,
                               scratch);
            });
}

}  // namespace attnjourney
