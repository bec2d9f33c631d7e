// What the CPU kernels found and choose, as JSON text in a uint8 tensor (strings leak through the ABI before
// torch 2.14).
#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>

#include "cpu/attention/block_lists.h"
#include "cpu/attention/few_rows.h"
#include "plan.h"
#include "tuning.h"

namespace attnjourney {
namespace {

Tensor json_tensor(const std::string& json) {
  const int64_t n = static_cast<int64_t>(json.size());
  Tensor t = torch::stable::empty({n}, ScalarType::Byte);
  std::memcpy(t.mutable_data_ptr(), json.data(), json.size());
  return t;
}

std::string quoted(const char* s) { return std::string("\"") + s + "\""; }

std::string tuning_text() {
  const Caches c = caches();
  kernels();  // chooses it
  return text("{\"name\": ", quoted(machine_tuning.name), ", \"forced\": ", quoted(forced_tuning()),
              ", \"vendor\": ", quoted(vendor()), ", \"l1_bytes\": ", c.l1_bytes, ", \"l1_ways\": ", c.l1_ways,
              ", \"l2_bytes\": ", c.l2_bytes, ", \"l2_ways\": ", c.l2_ways, "}");
}

Tensor cpu_info() try {
  int count = 0;
  const IsaEntry* list = isa_list(count);
  std::string found, built;
  for (int i = 0; i < count; i++) {
    built += (i ? ", " : "") + quoted(list[i].table().isa);
    if (list[i].runs()) found += (found.empty() ? "" : ", ") + quoted(list[i].table().isa);
  }
  const char* forced = std::getenv("ATTNJOURNEY_ISA");
  return json_tensor(text("{\"isa\": ", quoted(kernels().isa), ", \"forced\": ", forced && *forced ? "true" : "false",
                          ", \"tuning\": ", tuning_text(), ", \"found\": [", found, "], \"built\": [", built,
                          "], \"threads\": ", torch::stable::get_num_threads(), "}"));
} catch (...) {
  remember_and_rethrow();
}

std::string forward_text(const AttentionCall& c, const Sequences& sequences) {
  const std::vector<int64_t> few = few_row_items(c, sequences);
  if (!few.empty() && static_cast<int64_t>(few.size()) == c.batch) {
    const FewRowsPlan p = plan_few_rows(few_rows_of(c, sequences, few));
    return text("{\"kernel\": \"decode\", \"threads\": ", p.threads, ", \"query_tile\": ", sequences.largest().q_len,
                ", \"key_block\": ", p.chunk, ", \"rows_per_item\": ", p.rows, ", \"items\": ", p.items,
                ", \"scratch_bytes_per_thread\": ", p.space, "}");
  }
  const ForwardPlan f = plan_forward(c, sequences, few);
  return text("{\"kernel\": \"tiled\", \"threads\": ", f.threads, ", \"query_tile\": ", f.kernel->forward_tile,
              ", \"key_block\": ", f.kernel->forward_key_block(c.params), ", \"rows_per_item\": ", f.rows,
              ", \"items\": ", f.items, ", \"uncut_items\": ", f.uncut, ", \"rows_per_cut_item\": ", f.cut_rows,
              ", \"scratch_bytes_per_thread\": ", f.kernel->forward_space(c.params, std::min(f.rows, c.params.q_len)),
              "}");
}

void explain(StableIValue* stack, uint64_t arguments, uint64_t) try {
  Arguments in(stack, arguments);
  AttentionArgs args{.query = in.tensor(), .key = in.tensor(), .value = in.tensor(), .options = {}};
  AttentionOptions& options = args.options;
  read_mask(in, MaskArguments::dense, options);
  const OptionalTensor offsets = in.optional_tensor(), index = in.optional_tensor();
  const OptionalTensor partial = in.optional_tensor(), elements = in.optional_tensor();
  read_options(in, MaskArguments::dense, options);
  if (offsets && index && partial && elements)
    options.blocks = BlockTensors{.offsets = *offsets, .index = *index, .partial = *partial, .elements = *elements};
  if (options.dropout_p > 0) options.dropout_seed = torch::stable::full({}, 0, ScalarType::Long);
  const AttentionCall c = check_attention(std::move(args));
  const BlockLists lists(c);  // for its checks
  const Sequences sequences(c);
  std::vector<int64_t> heads(static_cast<size_t>(c.batch * c.kv_heads));
  std::iota(heads.begin(), heads.end(), 0);
  const BackwardPlan b = plan_backward(c, sequences, heads);
  std::string parts;  // of each head that is cut
  for (const BackwardPlan::Cut& cut : b.cuts) parts += (parts.empty() ? "" : ", ") + std::to_string(cut.parts);
  const Tensor json =
      json_tensor(text("{\"isa\": ", quoted(kernels().isa), ", \"tuning\": ", quoted(machine_tuning.name),
                       ", \"group\": ", c.params.group, ", \"forward\": ", forward_text(c, sequences),
                       ", \"backward\": {\"threads\": ", b.threads, ", \"query_tile\": ", b.kernel->backward_tile,
                       ", \"key_block\": ", b.kernel->backward_key_block,
                       ", \"heads_whole\": ", heads.size() - b.cuts.size(), ", \"parts_of_cut_heads\": [", parts, "]",
                       ", \"scratch_bytes_per_thread\": ", b.kernel->backward_space(c.params), "}}"));
  write_results(stack, json);
} catch (...) {
  remember_and_rethrow();
}

}  // namespace
}  // namespace attnjourney
STABLE_TORCH_LIBRARY_IMPL(attnjourney, CompositeExplicitAutograd, m) {
  m.impl("_cpu_info", TORCH_BOX(&attnjourney::cpu_info));
}
STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) { m.impl("_explain", attnjourney::explain); }
