// CPU entry of attention: the walk over batch, heads and work items. The operators around it are in operators.cpp.
#include "../attention.h"

#include <vector>

#include "plan.h"
#include "threads.h"

namespace attnjourney {
namespace {

int64_t item_size(ScalarType t) {
  switch (t) {
    case ScalarType::Double:
      return 8;
    case ScalarType::Float:
      return 4;
    case ScalarType::Bool:
      return 1;
    default:
      return 2;
  }
}

// Where (batch, head) of a tensor begins.
class HeadWalk {
 public:
  HeadWalk(const AttentionCall& call, const HeadMap& map, const Tensor& t)
      : call_(call), map_(map), base_(static_cast<char*>(t.data_ptr())), item_(item_size(t.scalar_type())) {}
  void* at(int64_t batch, int64_t head) const {
    int64_t offset = head / map_.head_div * map_.head_stride;
    for (int d = call_.batch_dims - 1; d >= 0; d--) {
      offset += batch % call_.batch_size[d] * map_.batch_stride[d];
      batch /= call_.batch_size[d];
    }
    return base_ + offset * item_;
  }

 private:
  const AttentionCall& call_;
  const HeadMap& map_;
  char* base_;
  int64_t item_;
};

uint64_t seed_of(const AttentionOptions& options) {
  return options.dropout_p > 0
             ? static_cast<uint64_t>(*static_cast<const int64_t*>(options.dropout_seed->const_data_ptr()))
             : 0;
}

void forward(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options, Tensor& out,
             Tensor& lse) {
  const Tensor q = aten::rows_contiguous(query), k = aten::rows_contiguous(key), v = aten::rows_contiguous(value);
  AttentionCall c = check_attention(q, k, v, options);
  AttentionParams& p = c.params;
  if (c.batch * c.q_heads * p.q_len == 0) return;
  p.dropout = Dropout::from(options.dropout_p, seed_of(options));
  p.out_row = out.stride(c.rank - 2);
  const HeadMap out_map = head_map(c, out, c.q_heads);
  const HeadWalk queries(c, c.query, q), keys(c, c.key, k), values(c, c.value, v), outs(c, out_map, out);
  const HeadWalk masks(c, c.mask, options.attn_mask ? *options.attn_mask : q);
  char* lses = static_cast<char*>(lse.mutable_data_ptr());
  const int64_t lse_item = item_size(c.lse_dtype);

  const ForwardPlan plan = plan_forward(c);
  const int64_t rows = plan.rows, blocks = plan.blocks, space = plan.kernel->forward_space(p, std::min(rows, p.q_len));
  run_queue(plan.heads * blocks, plan.threads, space, [&](int64_t item, void* scratch) {
    // head-major: a head's keys stay in cache. Last rows first: under a causal mask they cost most.
    const int64_t bh = item / blocks, first = (blocks - 1 - item % blocks) * rows;
    const int64_t b = bh / c.q_heads, head = bh % c.q_heads;
    HeadPointers h;
    h.index = static_cast<uint32_t>(bh);
    h.query = queries.at(b, head);
    h.key = keys.at(b, head);
    h.value = values.at(b, head);
    if (options.attn_mask) h.mask = masks.at(b, head);
    h.out = outs.at(b, head);
    h.lse = lses + bh * p.q_len * lse_item;
    plan.kernel->forward(p, h, first, std::min(rows, p.q_len - first), scratch);
  });
}

void backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
              const Tensor& value, const AttentionOptions& options, const Tensor& out, const Tensor& lse,
              AttentionGradients& gradients) {
  const Tensor q = aten::rows_contiguous(query), k = aten::rows_contiguous(key), v = aten::rows_contiguous(value);
  const Tensor o = aten::rows_contiguous(out), go = aten::rows_contiguous(grad_out), l = aten::contiguous(lse);
  OptionalTensor gl;
  if (grad_lse) gl = aten::contiguous(*grad_lse);
  AttentionCall c = check_attention(q, k, v, options);
  AttentionParams& p = c.params;
  p.dropout = Dropout::from(options.dropout_p, seed_of(options));
  p.out_row = o.stride(c.rank - 2);
  p.grad_out_row = go.stride(c.rank - 2);

  const bool want_mask = gradients.attn_mask.has_value();
  if (want_mask && (p.keys.bounded() || p.q_len == 0 || p.kv_len == 0)) torch::stable::zero_(*gradients.attn_mask);
  if (p.q_len == 0 || p.kv_len == 0 || c.batch * c.q_heads == 0) {  // nothing sees anything
    for (OptionalTensor* g : {&gradients.query, &gradients.key, &gradients.value})
      if (*g) torch::stable::zero_(**g);
    return;
  }

  const HeadMap out_map = head_map(c, o, c.q_heads), grad_out_map = head_map(c, go, c.q_heads);
  const auto map_of = [&](const OptionalTensor& t, int64_t heads) { return t ? head_map(c, *t, heads) : HeadMap{}; };
  const HeadMap gq_map = map_of(gradients.query, c.q_heads), gk_map = map_of(gradients.key, c.kv_heads);
  const HeadMap gv_map = map_of(gradients.value, c.kv_heads), gm_map = map_of(gradients.attn_mask, c.q_heads);
  const HeadWalk queries(c, c.query, q), keys(c, c.key, k), values(c, c.value, v), outs(c, out_map, o);
  const HeadWalk grads(c, grad_out_map, go), masks(c, c.mask, options.attn_mask ? *options.attn_mask : q);
  const HeadWalk gq(c, gq_map, gradients.query ? *gradients.query : q),
      gk(c, gk_map, gradients.key ? *gradients.key : q);
  const HeadWalk gv(c, gv_map, gradients.value ? *gradients.value : q);
  const HeadWalk gm(c, gm_map, want_mask ? *gradients.attn_mask : q);
  const char* lses = static_cast<const char*>(l.const_data_ptr());
  const char* grad_lses = gl ? static_cast<const char*>(gl->const_data_ptr()) : nullptr;
  const int64_t lse_item = item_size(c.lse_dtype);

  const auto group_of = [&](int64_t item, HeadPointers* h, HeadGradients* g) {
    const int64_t b = item / c.kv_heads, kv = item % c.kv_heads;
    for (int64_t i = 0; i < p.group; i++) {
      const int64_t head = kv * p.group + i, bh = b * c.q_heads + head;
      h[i].index = static_cast<uint32_t>(bh);
      h[i].query = queries.at(b, head);
      h[i].key = keys.at(b, head);
      h[i].value = values.at(b, head);
      if (options.attn_mask) h[i].mask = masks.at(b, head);
      h[i].out = outs.at(b, head);
      h[i].lse = const_cast<char*>(lses + bh * p.q_len * lse_item);
      h[i].grad_out = grads.at(b, head);
      if (grad_lses) h[i].grad_lse = grad_lses + bh * p.q_len * lse_item;
      if (gradients.query) g[i].query = gq.at(b, head), g[i].query_row = gradients.query->stride(c.rank - 2);
      if (gradients.key) g[i].key = gk.at(b, kv), g[i].key_row = gradients.key->stride(c.rank - 2);
      if (gradients.value) g[i].value = gv.at(b, kv), g[i].value_row = gradients.value->stride(c.rank - 2);
      if (want_mask) g[i].mask = gm.at(b, head), g[i].mask_row = gradients.attn_mask->stride(c.rank - 2);
    }
  };

  const BackwardPlan plan = plan_backward(c);
  const AttentionKernels& kernel = *plan.kernel;
  const int64_t whole = plan.whole, left = plan.items - whole, parts = plan.parts, space = kernel.backward_space(p);
  const auto run = [&](int64_t item, int64_t part, int64_t n_parts, void* partial, void* scratch) {
    std::vector<HeadPointers> h(static_cast<size_t>(p.group));
    std::vector<HeadGradients> g(static_cast<size_t>(p.group));
    group_of(item, h.data(), g.data());
    kernel.backward(p, h.data(), g.data(), part, n_parts, partial, scratch);
  };
  if (whole)
    run_queue(whole, plan.threads, space, [&](int64_t item, void* scratch) { run(item, 0, 1, nullptr, scratch); });
  if (!left) return;
  const int64_t compute_item = c.dtype == ScalarType::Double ? 8 : 4;
  const int64_t ld = (p.head_dim + 64 / compute_item - 1) / (64 / compute_item) * (64 / compute_item);
  const int64_t head_numbers = p.q_len * ld, part_numbers = p.group * head_numbers;
  Tensor partials = aten::empty(q, {gradients.query ? left * parts * part_numbers : 0}, c.lse_dtype);
  char* partial = static_cast<char*>(partials.mutable_data_ptr());
  run_queue(left * parts, plan.threads, space, [&](int64_t i, void* scratch) {
    run(whole + i / parts, i % parts, parts, gradients.query ? partial + i * part_numbers * compute_item : nullptr,
        scratch);
  });
  if (!gradients.query) return;
  constexpr int64_t rows = 256;
  const int64_t blocks = (p.q_len + rows - 1) / rows;
  run_queue(left * p.group * blocks, plan.threads, 0, [&](int64_t i, void*) {
    const int64_t item = i / (p.group * blocks), member = i / blocks % p.group, first = i % blocks * rows;
    const int64_t kv = (whole + item) % c.kv_heads, b = (whole + item) / c.kv_heads;
    HeadGradients g;
    g.query = gq.at(b, kv * p.group + member);
    g.query_row = gradients.query->stride(c.rank - 2);
    kernel.sum_parts(p, partial + (item * parts * part_numbers + member * head_numbers) * compute_item, part_numbers,
                     parts, first, std::min(rows, p.q_len - first), g);
  });
}

}  // namespace

const AttentionBackend cpu_attention = {forward, backward};

}  // namespace attnjourney
