// CPU entry of gated linear attention: sequences, state heads and, where these are fewer than threads, parts of the
// values' columns, each of which is computed by itself.
#include <algorithm>
#include <numeric>

#include "cpu/attention/sequences.h"
#include "cpu/plan.h"
#include "cpu/threads.h"
#include "linear_cpu.h"

namespace attnjourney {
namespace {

// (batch, heads, len, ...) with dense rows; kept, for what is given may be a copy that nobody else holds
struct GatedRows {
  GatedRows(const OptionalTensor& t, int64_t dims, std::optional<ScalarType> dtype = std::nullopt) {
    if (!t) return;
    kept = dtype && t->scalar_type() != *dtype ? torch::stable::to(*t, *dtype) : *t;
    if (dims == 4) kept = aten::rows_contiguous(*kept);
    item = item_size(kept->scalar_type());
    base = static_cast<char*>(kept->data_ptr());
  }
  void* at(int64_t b, int64_t h, int64_t row, int64_t column = 0) const {
    if (!base) return nullptr;
    return base + (b * stride_of(*kept, 0) + h * stride_of(*kept, 1) + row * stride_of(*kept, 2) + column) * item;
  }
  int64_t stride(int64_t d) const { return kept ? stride_of(*kept, d) : 0; }
  OptionalTensor kept;
  char* base = nullptr;
  int64_t item = 0;
};

struct GatedItem {
  int64_t sequence, head, part;
};

// What a call is cut into.
struct GatedPlan {
  GatedPlan(const GatedCall& c, const GatedInputs& in, int64_t lanes, double products) : params(c.params) {
    begins = {0}, lengths.assign(static_cast<size_t>(c.sequences), c.len);
    if (in.cu_seqlens) read_offsets(c, *in.cu_seqlens);
    const GatedParams& p = c.params;
    const int64_t heads = c.sequences * c.v_heads;
    const double rows = static_cast<double>(in.cu_seqlens ? used : c.len * c.batch) * static_cast<double>(c.v_heads);
    const double flops = 2 * products * rows * static_cast<double>(p.head_dim) * static_cast<double>(p.v_head_dim);
    const int64_t most = std::max<int64_t>(1, p.v_head_dim / (2 * lanes));
    const int64_t wanted = thread_count(heads * most, flops);
    const int64_t parts_wanted = heads ? std::min(most, (wanted + heads - 1) / heads) : 1;
    cols = ((p.v_head_dim + parts_wanted - 1) / parts_wanted + lanes - 1) / lanes * lanes;
    parts = cols ? std::max<int64_t>(1, (p.v_head_dim + cols - 1) / cols) : 1;
    threads = std::min(wanted, heads * parts);
    std::vector<int64_t> order(static_cast<size_t>(c.sequences));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
    for (const int64_t n : order)
      for (int64_t h = 0; h < c.v_heads; h++)
        for (int64_t part = 0; part < parts; part++) items.push_back({n, h, part});
  }

  void read_offsets(const GatedCall& c, const Tensor& cu_seqlens) {
    begins = index_values(cu_seqlens);
    check_value(begins[0] == 0, "cu_seqlens: expected to begin with 0, got ", begins[0]);
    for (size_t n = 0; n + 1 < begins.size(); n++) {
      lengths[n] = begins[n + 1] - begins[n];
      check_value(lengths[n] >= 0, "cu_seqlens: expected numbers that never fall, got ", begins[n + 1], " after ",
                  begins[n]);
    }
    used = begins.back();
    check_value(used <= c.len, "cu_seqlens: expected at most the number of rows, ", c.len, ", got ", used);
    packed = true;
  }
  int64_t batch(int64_t sequence) const { return packed ? 0 : sequence; }
  int64_t begin(int64_t sequence) const { return packed ? begins[static_cast<size_t>(sequence)] : 0; }
  int64_t longest() const { return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end()); }
  int64_t cols_of(int64_t part) const { return std::min(cols, params.v_head_dim - part * cols); }

  GatedParams params;  // with the strides of the call
  std::vector<int64_t> begins, lengths;
  std::vector<GatedItem> items;
  int64_t parts = 1, cols = 0, threads = 1, used = 0;
  bool packed = false;
};

// The inputs of every head.
struct GatedTensors {
  GatedTensors(const GatedCall& c, const GatedInputs& in, GatedPlan& plan)
      : c(c),
        query(in.query, 4),
        key(in.key, 4),
        value(in.value, 4),
        gate(in.gate, in.gate ? in.gate->dim() : 3, c.state_dtype),
        beta(in.beta, 3, c.state_dtype) {
    if (in.initial_state) initial = aten::contiguous(*in.initial_state);
    GatedParams& p = plan.params;
    p.q_head = query.stride(1), p.q_row = query.stride(2), p.k_row = key.stride(2), p.v_row = value.stride(2);
    p.gate_row = gate.stride(2), p.beta_row = beta.stride(2);
    p.out_head = c.len * p.v_head_dim, p.grad_q_head = c.len * p.head_dim;
  }

  // a number of a state (sequence, head, 0, column)
  void* in_state(const OptionalTensor& t, const GatedItem& i, int64_t column) const {
    if (!t || t->numel() == 0) return nullptr;
    const int64_t size = c.params.head_dim * c.params.v_head_dim;
    return static_cast<char*>(t->data_ptr()) +
           ((i.sequence * c.v_heads + i.head) * size + column) * item_size(t->scalar_type());
  }

  GatedHead head(const GatedPlan& plan, const GatedItem& i) const {
    const int64_t b = plan.batch(i.sequence), row = plan.begin(i.sequence), column = i.part * plan.cols;
    GatedHead h;
    h.len = plan.lengths[static_cast<size_t>(i.sequence)];
    h.cols = plan.cols_of(i.part);
    h.query = query.at(b, i.head * c.q_heads / std::max<int64_t>(1, c.v_heads), row);
    h.key = key.at(b, i.head / (c.v_heads / c.kv_heads), row);
    h.value = value.at(b, i.head, row, column);
    h.gate = gate.at(b, i.head, row);
    h.beta = beta.at(b, i.head, row);
    h.initial_state = in_state(initial, i, column);
    return h;
  }

  const GatedCall& c;
  GatedRows query, key, value, gate, beta;
  OptionalTensor initial;
};

// a number of a dense result (..., heads, len, width)
void* in_rows(const Tensor& t, int64_t head, int64_t len, int64_t row, int64_t width, int64_t column = 0) {
  if (t.numel() == 0 || !t.data_ptr()) return nullptr;
  return static_cast<char*>(t.data_ptr()) + ((head * len + row) * width + column) * item_size(t.scalar_type());
}

void clear_unused(const GatedPlan& plan, const GatedCall& c, std::initializer_list<const Tensor*> results) {
  if (!plan.packed || plan.used == c.len) return;
  for (const Tensor* t : results)
    if (t->numel()) aten::clear(*t);
}

// Gradients that several heads or parts share: (batch, parts, heads, len, width) in compute precision, and their sum.
struct SharedGradient {
  SharedGradient(const GatedCall& c, const GatedPlan& plan, const Tensor& to, int64_t heads, int64_t width, bool shared)
      : to(to), heads(heads), width(width) {
    if (to.numel() == 0 || !shared) return;
    sums = aten::empty(to, {c.batch, plan.parts, heads, c.len, width}, c.state_dtype);
  }
  const Tensor& own() const { return sums ? *sums : to; }
  void* at(const GatedCall& c, const GatedPlan& plan, const GatedItem& i, int64_t head) const {
    const int64_t b = plan.batch(i.sequence), part = sums ? i.part : 0, parts = sums ? plan.parts : 1;
    return in_rows(own(), (b * parts + part) * heads + head, c.len, plan.begin(i.sequence), width);
  }
  void finish(const GatedCall& c, const GatedPlan& plan) const {
    if (!sums) return;
    const int64_t kept = to.size(1);
    const Tensor by_head = torch::stable::view(*sums, {c.batch, plan.parts, kept, heads / kept, c.len, width});
    Tensor target = torch::stable::view(to, {c.batch, kept, c.len, width});
    torch::stable::copy_(target, aten::sum(by_head, {1, 3}));
  }
  Tensor to;
  OptionalTensor sums;
  int64_t heads, width;
};

}  // namespace

void cpu_gated_forward(const GatedCall& c, const GatedInputs& in, const Tensor& out, const Tensor& state) {
  const GatedKernels& k = kernels().gated->of[static_cast<int>(kernel_dtype(c.dtype))];
  GatedPlan plan(c, in, k.lanes, 3);
  const GatedTensors tensors(c, in, plan);
  const GatedParams& p = plan.params;
  clear_unused(plan, c, {&out});
  const int64_t space = std::max(k.step_space(p, plan.cols), k.forward_space(p, plan.cols));
  run_queue(static_cast<int64_t>(plan.items.size()), plan.threads, space, [&](int64_t item, void* memory) {
    const GatedItem& i = plan.items[static_cast<size_t>(item)];
    GatedHead head = tensors.head(plan, i);
    const int64_t column = i.part * plan.cols, row = plan.begin(i.sequence);
    head.out =
        in_rows(out, plan.batch(i.sequence) * c.out_heads() + i.head * p.group, c.len, row, p.v_head_dim, column);
    head.state = tensors.in_state(state, i, column);
    (head.len <= k.step_rows ? k.step : k.forward)(p, head, memory);
  });
}

void cpu_gated_backward(const GatedCall& c, const GatedInputs& in, const Tensor& grad_out,
                        const OptionalTensor& grad_state, const GatedGradients& gradients) {
  const GatedKernels& k = kernels().gated->of[static_cast<int>(kernel_dtype(c.dtype))];
  GatedPlan plan(c, in, k.lanes, 8);
  const GatedTensors tensors(c, in, plan);
  const GatedRows grads(grad_out, 4);
  GatedParams& p = plan.params;
  p.grad_out_head = grads.stride(1), p.grad_out_row = grads.stride(2);
  OptionalTensor last;
  if (grad_state) last = aten::contiguous(*grad_state);
  const auto& [grad_query, grad_key, grad_value, grad_gate, grad_beta, grad_initial] = gradients;
  const bool split = plan.parts > 1, shared = split || c.v_heads != c.kv_heads || c.v_heads > c.q_heads;
  const int64_t gate_width = p.gate == Gate::channel ? p.head_dim : 1;
  const SharedGradient query(c, plan, grad_query, c.out_heads(), p.head_dim, shared);
  const SharedGradient key(c, plan, grad_key, c.v_heads, p.head_dim, shared);
  const SharedGradient gate(c, plan, grad_gate, c.v_heads, gate_width, split);
  const SharedGradient beta(c, plan, grad_beta, c.v_heads, 1, split);
  clear_unused(plan, c, {&query.own(), &key.own(), &grad_value, &gate.own(), &beta.own()});
  const int64_t space = k.backward_space(p, plan.cols, plan.longest());
  run_queue(static_cast<int64_t>(plan.items.size()), plan.threads, space, [&](int64_t item, void* memory) {
    const GatedItem& i = plan.items[static_cast<size_t>(item)];
    GatedHead head = tensors.head(plan, i);
    const int64_t column = i.part * plan.cols, row = plan.begin(i.sequence), b = plan.batch(i.sequence);
    head.grad_out = grads.at(b, i.head * p.group, row, column);
    head.grad_state = tensors.in_state(last, i, column);
    head.partial = shared;
    head.grad_query = query.at(c, plan, i, i.head * p.group);
    head.grad_key = key.at(c, plan, i, i.head);
    head.grad_value = in_rows(grad_value, b * c.v_heads + i.head, c.len, row, p.v_head_dim, column);
    head.grad_gate = gate.at(c, plan, i, i.head);
    head.grad_beta = beta.at(c, plan, i, i.head);
    head.grad_initial_state = tensors.in_state(grad_initial, i, column);
    k.backward(p, head, memory);
  });
  for (const SharedGradient* g : {&query, &key, &gate, &beta}) g->finish(c, plan);
}

}  // namespace attnjourney
