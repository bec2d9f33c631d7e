// CPU entry of attention's backward.
#include <algorithm>

#include "attention_cpu.h"
#include "cpu/kernels/common/common.h"
#include "cpu/plan.h"
#include "cpu/threads.h"
#include "head_inputs.h"
#include "mask_gradient.h"
#include "tangents.h"

namespace attnjourney {
namespace {

// sums[batch * q_heads][parts] -> a gradient (q_heads,) or (batch, q_heads)
void write_per_head(const AttentionCall& c, const std::vector<double>& sums, int64_t parts, const Tensor& grad) {
  const int64_t n = grad.numel();
  std::vector<double> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < c.batch * c.q_heads * parts; i++) x[i / parts % n] += sums[i];
  const auto write = [&](auto kind) {
    for (int64_t i = 0; i < n; i++)
      store_one(static_cast<decltype(kind)*>(grad.data_ptr()) + i, Compute<decltype(kind)>(x[i]));
  };
  switch (grad.scalar_type()) {
    case ScalarType::Double:
      return write(double{});
    case ScalarType::BFloat16:
      return write(bf16{});
    case ScalarType::Half:
      return write(f16{});
    default:
      return write(float{});
  }
}

// the backward, or with `tangents` its derivative in their direction
void backward(AttentionCall& c, const AttentionSaved& saved, const AttentionTangents* tangents,
              const AttentionGradients& gradients) {
  const Tensor& query = c.args.query;
  AttentionParams& p = c.params;
  p.dropout = dropout_of(c.args.options);
  p.out_row = stride_of(saved.out, c.rank - 2);
  p.grad_out_row = stride_of(saved.grad_out, c.rank - 2);

  if (p.q_len == 0 || c.batch * c.q_heads == 0 || (p.kv_len == 0 && !gradients.sinks)) {  // nothing sees anything
    for (const OptionalTensor* g : gradients.all())
      if (*g) aten::clear(**g);
    return;
  }

  const Sequences sequences(c);
  const Tangents directions(c, tangents ? *tangents : AttentionTangents{});
  const HeadInputs heads(c, sequences, saved.out, saved.lse, saved.stats);
  const HeadMap grad_out_map = head_map(c, saved.grad_out, c.q_heads);
  const auto map_of = [&](const OptionalTensor& t, int64_t heads) { return t ? head_map(c, *t, heads) : HeadMap{}; };
  const HeadMap gq_map = map_of(gradients.query, c.q_heads), gk_map = map_of(gradients.key, c.kv_heads);
  const HeadMap gv_map = map_of(gradients.value, c.kv_heads);
  const HeadWalk grads(c, grad_out_map, saved.grad_out);
  const HeadWalk gq(c, gq_map, gradients.query.value_or(query)), gk(c, gk_map, gradients.key.value_or(query));
  const HeadWalk gv(c, gv_map, gradients.value.value_or(query));
  char* grad_lses = saved.grad_lse ? static_cast<char*>(saved.grad_lse->data_ptr()) : nullptr;

  if (gradients.query) clear_rows(c, sequences, gq, c.q_heads, *gradients.query);
  if (c.packed)
    for (const OptionalTensor* g : {&gradients.key, &gradients.value}) {
      if (!*g || sequences.used_keys() == p.kv_len) continue;
      Tensor whole = **g;
      aten::clear(torch::stable::narrow(whole, c.rank - 2, sequences.used_keys(), p.kv_len - sequences.used_keys()));
    }

  MaskGradient mask_gradient(c, sequences, gradients.attn_mask, c.batch * c.kv_heads);
  std::vector<BackwardPlan> plans;
  int64_t most_parts = 1;
  for (const std::vector<int64_t>& items : mask_gradient.rounds()) {
    plans.push_back(plan_backward(c, sequences, items));
    most_parts = std::max(most_parts, plans.back().most_parts);
  }
  mask_gradient.allocate(most_parts);
  const size_t sums = static_cast<size_t>(c.batch * c.q_heads * most_parts);
  std::vector<double> grad_sinks(gradients.sinks ? sums : 0), grad_slopes(gradients.alibi_slopes ? sums : 0);

  const auto group_of = [&](int64_t item, int64_t part, HeadPointers* h, HeadGradients* g) {
    const int64_t b = item / c.kv_heads, kv = item % c.kv_heads;
    const int64_t q_begin = sequences.q_begin(b), k_begin = sequences.k_begin(b);
    for (int64_t i = 0; i < p.group; i++) {
      const int64_t head = kv * p.group + i, bh = b * c.q_heads + head;
      h[i] = heads.at(b, head);
      h[i].grad_out = grads.at(b, head, q_begin);
      if (grad_lses) h[i].grad_lse = lse_at(c, grad_lses, b, head, q_begin);
      if (gradients.query)
        g[i].query = gq.at(b, head, q_begin), g[i].query_row = stride_of(*gradients.query, c.rank - 2);
      if (gradients.key) g[i].key = gk.at(b, kv, k_begin), g[i].key_row = stride_of(*gradients.key, c.rank - 2);
      if (gradients.value) g[i].value = gv.at(b, kv, k_begin), g[i].value_row = stride_of(*gradients.value, c.rank - 2);
      mask_gradient.place(g[i], item, part, b, head);
      if (gradients.sinks) g[i].sink = &grad_sinks[static_cast<size_t>(bh * most_parts)];
      if (gradients.alibi_slopes) g[i].slope = &grad_slopes[static_cast<size_t>(bh * most_parts + part)];
    }
  };

  const AttentionKernels& kernel = kernels_for(c);
  const AttentionParams largest = sequences.largest();
  const int64_t space = tangents ? kernel.backward_jvp_space(largest) : kernel.backward_space(largest);
  const int64_t compute_item = item_size(c.lse_dtype);
  const int64_t ld = (p.head_dim + 64 / compute_item - 1) / (64 / compute_item) * (64 / compute_item);
  const int64_t part_numbers = p.group * largest.q_len * ld;
  for (const BackwardPlan& plan : plans) {
    OptionalTensor partials;
    if (gradients.query && plan.partials) partials = aten::empty(query, {plan.partials * part_numbers}, c.lse_dtype);
    char* const partial = partials ? static_cast<char*>(partials->mutable_data_ptr()) : nullptr;
    run_queue(static_cast<int64_t>(plan.pieces.size()), plan.threads, space, [&](int64_t i, void* scratch) {
      const auto [item, part, parts, index] = plan.pieces[static_cast<size_t>(i)];
      std::vector<HeadPointers> h(static_cast<size_t>(p.group));
      std::vector<HeadGradients> g(static_cast<size_t>(p.group));
      group_of(item, part, h.data(), g.data());
      const AttentionParams own = sequences.params(item / c.kv_heads);
      void* const own_dq = parts > 1 && partial ? partial + index * part_numbers * compute_item : nullptr;
      if (!tangents) return kernel.backward(own, h.data(), g.data(), part, parts, own_dq, scratch);
      std::vector<HeadTangents> d;
      for (int64_t i = 0; i < p.group; i++)
        d.push_back(directions.at(sequences, item / c.kv_heads, item % c.kv_heads * p.group + i));
      kernel.backward_jvp(own, h.data(), d.data(), g.data(), part, parts, own_dq, scratch);
    });
    if (!partial) continue;
    constexpr int64_t rows = 256;
    const int64_t blocks = (largest.q_len + rows - 1) / rows, units = p.group * blocks;
    run_queue(static_cast<int64_t>(plan.cuts.size()) * units, plan.threads, 0, [&](int64_t i, void*) {
      const auto [item, parts, first_partial] = plan.cuts[static_cast<size_t>(i / units)];
      const int64_t member = i / blocks % p.group, first = i % blocks * rows;
      const int64_t b = item / c.kv_heads, kv = item % c.kv_heads, q_len = sequences.q_len(b);
      if (first >= q_len) return;
      HeadGradients g;
      g.query = gq.at(b, kv * p.group + member, sequences.q_begin(b));
      g.query_row = stride_of(*gradients.query, c.rank - 2);
      kernel.sum_parts(p, partial + (first_partial * part_numbers + member * q_len * ld) * compute_item, part_numbers,
                       parts, first, std::min(rows, q_len - first), g);
    });
  }
  mask_gradient.finish();
  if (gradients.sinks) write_per_head(c, grad_sinks, most_parts, *gradients.sinks);
  if (gradients.alibi_slopes) write_per_head(c, grad_slopes, most_parts, *gradients.alibi_slopes);
}

}  // namespace

void cpu_attention_backward(AttentionCall& c, const AttentionSaved& saved, const AttentionGradients& gradients) {
  backward(c, saved, nullptr, gradients);
}

void cpu_attention_backward_jvp(AttentionCall& c, const AttentionSaved& saved, const AttentionTangents& tangents,
                                const AttentionGradients& gradients) {
  backward(c, saved, &tangents, gradients);
}

}  // namespace attnjourney
