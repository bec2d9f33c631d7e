// What the CPU kernels found and choose, as JSON text in a uint8 tensor (strings leak through the ABI before
// torch 2.14).
#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>

#include "cpu/attention/block_lists.h"
#include "plan.h"

namespace attnjourney {
namespace {

Tensor json_tensor(const std::string& json) {
  const int64_t n = static_cast<int64_t>(json.size());
  Tensor t = torch::stable::empty({n}, ScalarType::Byte);
  std::memcpy(t.mutable_data_ptr(), json.data(), json.size());
  return t;
}

std::string quoted(const char* s) { return std::string("\"") + s + "\""; }

Tensor cpu_info() {
  int count = 0;
  const IsaEntry* list = isa_list(count);
  std::string found, built;
  for (int i = 0; i < count; i++) {
    built += (i ? ", " : "") + quoted(list[i].table().isa);
    if (list[i].runs()) found += (found.empty() ? "" : ", ") + quoted(list[i].table().isa);
  }
  const char* forced = std::getenv("ATTNJOURNEY_ISA");
  return json_tensor(text("{\"isa\": ", quoted(kernels().isa), ", \"forced\": ", forced && *forced ? "true" : "false",
                          ", \"found\": [", found, "], \"built\": [", built,
                          "], \"threads\": ", torch::stable::get_num_threads(), "}"));
}

Tensor explain(const Tensor& query, const Tensor& key, const Tensor& value, OptionalTensor attn_mask, double dropout_p,
               bool is_causal, std::optional<double> scale, bool enable_gqa, int64_t causal_alignment,
               std::vector<int64_t> window_size, int64_t prefix_length, OptionalTensor key_lengths,
               OptionalTensor query_lengths, double softcap, OptionalTensor sinks, OptionalTensor alibi_slopes,
               OptionalTensor block_offsets, OptionalTensor block_index, OptionalTensor block_partial,
               OptionalTensor block_elements) {
  OptionalTensor seed;
  if (dropout_p > 0) seed = torch::stable::full({}, 0, ScalarType::Long);
  check_value(window_size.size() == 2, "window_size: expected two numbers (left, right), got ", window_size.size());
  AttentionOptions options{attn_mask,     dropout_p,    is_causal,        scale,
                           enable_gqa,    seed,         causal_alignment, {window_size[0], window_size[1]},
                           prefix_length, key_lengths,  query_lengths,    softcap,
                           sinks,         alibi_slopes, std::nullopt,     std::nullopt};
  if (block_offsets && block_index && block_partial && block_elements)
    options.blocks = BlockTensors{*block_offsets, *block_index, *block_partial, *block_elements};
  const AttentionCall c = check_attention(query, key, value, options);
  const BlockLists lists(c, options);  // for its checks
  const Sequences sequences(c, options);
  const ForwardPlan f = plan_forward(c, sequences);
  std::vector<int64_t> heads(static_cast<size_t>(c.batch * c.kv_heads));
  std::iota(heads.begin(), heads.end(), 0);
  const BackwardPlan b = plan_backward(c, sequences, heads);
  const int64_t whole = static_cast<int64_t>(heads.size()) - b.split;
  return json_tensor(text(
      "{\"isa\": ", quoted(kernels().isa), ", \"group\": ", c.params.group, ", \"forward\": {\"threads\": ", f.threads,
      ", \"query_tile\": ", f.kernel->forward_tile, ", \"key_block\": ", f.kernel->forward_key_block,
      ", \"rows_per_item\": ", f.rows, ", \"items\": ", f.items, ", \"scratch_bytes_per_thread\": ",
      f.kernel->forward_space(c.params, std::min(f.rows, c.params.q_len)), "}, \"backward\": {\"threads\": ", b.threads,
      ", \"query_tile\": ", b.kernel->backward_tile, ", \"key_block\": ", b.kernel->backward_key_block,
      ", \"heads_whole\": ", whole, ", \"heads_split\": ", b.split, ", \"parts_per_split_head\": ", b.parts,
      ", \"scratch_bytes_per_thread\": ", b.kernel->backward_space(c.params), "}}"));
}

}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def("_cpu_info() -> Tensor");
  m.def(
      "_explain(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
      "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, int causal_alignment=0, "
      "int[2] window_size=[-1, -1], int prefix_length=0, Tensor? key_lengths=None, Tensor? query_lengths=None, "
      "float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? block_offsets=None, "
      "Tensor? block_index=None, Tensor? block_partial=None, Tensor? block_elements=None) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(attnjourney, CompositeExplicitAutograd, m) {
  m.impl("_cpu_info", TORCH_BOX(&attnjourney::cpu_info));
}
STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) { m.impl("_explain", TORCH_BOX(&attnjourney::explain)); }
