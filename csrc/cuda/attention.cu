// CUDA entry of attention: from tensors to launches. The operators around it are in operators.cu.
#include <torch/csrc/stable/accelerator.h>

#include <cmath>

#include "attention_cuda.h"
#include "device.h"
#include "layout.h"
#include "options.h"
#include "sequences.h"
#include "served.h"

namespace attnjourney {
namespace {

// whether a kernel has to look at which keys a row sees
bool is_ranged(const AttentionCall& c, const AttentionOptions& o) {
  return c.params.keys.bounded() || o.query_lengths || o.key_lengths;
}

template <class Task>
void describe(Task& p, const AttentionCall& c, const Indices& indices, const View& q, const View& k, const View& v) {
  p.query = q.data(), p.key = k.data(), p.value = v.data();
  p.query_strides = q.strides, p.key_strides = k.strides, p.value_strides = v.strides;
  p.batch = static_cast<int>(c.batch), p.q_heads = static_cast<int>(c.q_heads);
  p.group = static_cast<int>(c.params.group);
  describe_sequences(p, c, indices);
  p.head_dim = static_cast<int>(chunks(c.params.head_dim));
  p.v_head_dim = static_cast<int>(chunks(c.params.v_head_dim));
  if (c.packed) p.query_strides.batch = p.key_strides.batch = p.value_strides.batch = 0;
  p.scale_log2 = static_cast<float>(c.params.scale * 1.4426950408889634);
}

void forward(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options, Tensor& out,
             Tensor& lse) {
  const AttentionCall c = check_attention(query, key, value, options);
  check_served(c, options, false);
  if (c.packed) {  // rows of no sequence
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -INFINITY);
  }
  if (c.batch * c.q_heads * c.params.q_len == 0) return;
  const bool options_used = has_options(c, options);
  if (c.params.kv_len == 0 && !options.sinks) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -INFINITY);
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Device device = current_device(query);
  const cudaStream_t stream = current_stream(device.index);
  const View q = view_of(c, query, c.q_heads), k = view_of(c, key, c.kv_heads), v = view_of(c, value, c.kv_heads);
  Output o(c, out, c.q_heads);
  const Indices indices(c, options);
  const OptionInputs inputs(c, options, query);
  ForwardTask p{};
  describe(p, c, indices, q, k, v);
  p.scores = inputs.scores();
  if (c.packed) o.clear();
  p.out = o.data(), p.out_strides = o.strides_of(c), p.lse = static_cast<float*>(lse.data_ptr());
  const bool bf16 = c.dtype == ScalarType::BFloat16;
  const bool hopper =
      device.capability == 90 && !options_used && hopper_forward(forward_size(p.head_dim, p.v_head_dim));
  OptionalTensor counter;
  if (hopper) p.counter = tile_counter(query, device.index, stream, counter);
  const ForwardLaunch launch = options_used ? (bf16 ? sm80_options_forward_bf16 : sm80_options_forward_fp16)
                               : hopper     ? (bf16 ? sm90_forward_bf16 : sm90_forward_fp16)
                                            : (bf16 ? sm80_forward_bf16 : sm80_forward_fp16);
  launch(p, is_ranged(c, options), device, stream);
  o.finish();
}

void backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
              const Tensor& value, const AttentionOptions& options, const Tensor& out, const Tensor& lse,
              AttentionGradients& gradients) {
  const AttentionCall c = check_attention(query, key, value, options);
  check_served(c, options, true);
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Device device = current_device(query);
  const cudaStream_t stream = current_stream(device.index);
  const bool options_used = has_options(c, options);
  const int64_t rows_in_all = c.batch * c.q_heads * c.params.q_len;
  if (rows_in_all == 0 || (c.params.kv_len == 0 && !options.sinks)) {  // nobody reads, nobody is read
    for (const OptionalTensor* g : {&gradients.query, &gradients.key, &gradients.value, &gradients.attn_mask,
                                    &gradients.sinks, &gradients.alibi_slopes})
      if (*g) {
        Tensor t = **g;
        torch::stable::zero_(t);
      }
    return;
  }
  const View q = view_of(c, query, c.q_heads), k = view_of(c, key, c.kv_heads), v = view_of(c, value, c.kv_heads);
  const View o = view_of(c, out, c.q_heads), d_out = view_of(c, grad_out, c.q_heads);
  const Tensor dense_lse = aten::contiguous(lse);
  OptionalTensor dense_grad_lse;
  if (grad_lse) dense_grad_lse = aten::contiguous(*grad_lse);
  const Indices indices(c, options);
  const OptionInputs inputs(c, options, query);
  std::optional<Output> dq, dk, dv;
  BackwardTask p{};
  describe(p, c, indices, q, k, v);
  p.scores = inputs.scores();
  p.out = o.data(), p.out_strides = o.strides, p.grad_out = d_out.data(), p.grad_out_strides = d_out.strides;
  if (c.packed) p.out_strides.batch = p.grad_out_strides.batch = 0;
  p.lse = static_cast<const float*>(dense_lse.data_ptr());
  p.grad_lse = dense_grad_lse ? static_cast<const float*>(dense_grad_lse->data_ptr()) : nullptr;
  const auto output = [&](std::optional<Output>& to, const OptionalTensor& t, int64_t heads, void*& data, Strides& s) {
    if (!t) return;
    to.emplace(c, *t, heads);
    if (c.packed) to->clear();
    data = to->data(), s = to->strides_of(c);
  };
  output(dq, gradients.query, c.q_heads, p.grad_query, p.grad_query_strides);
  output(dk, gradients.key, c.kv_heads, p.grad_key, p.grad_key_strides);
  output(dv, gradients.value, c.kv_heads, p.grad_value, p.grad_value_strides);

  const int size = backward_size(p.head_dim, p.v_head_dim), rows = backward_rows(size);
  const bool bf16 = c.dtype == ScalarType::BFloat16,
             hopper = device.capability == 90 && !options_used && hopper_backward(size);
  const bool deterministic = deterministic_algorithms();
  p.kv_heads = static_cast<int>(c.kv_heads), p.scale = static_cast<float>(c.params.scale);
  p.rows = c.packed ? (p.q_len / rows + p.batch) * rows : (p.q_len + rows - 1) / rows * rows;
  const int keys = backward_keys(size, options_used);
  p.key_tiles = c.packed ? p.kv_len / keys + p.batch : (p.kv_len + keys - 1) / keys;
  p.tile_rows = rows, p.tile_keys = keys;
  const int64_t pairs = c.packed ? c.q_heads : c.batch * c.q_heads;
  const Tensor sum = aten::empty(query, {pairs, p.rows, size}, ScalarType::Float);
  const Tensor stats = aten::empty(query, {2, pairs, p.rows}, ScalarType::Float);
  p.query_sum = static_cast<float*>(sum.data_ptr());
  p.lse2 = static_cast<float*>(stats.data_ptr()), p.delta = p.lse2 + pairs * p.rows;
  OptionalTensor key_value_sum, turn;
  if (deterministic) {
    turn = aten::empty(query, {pairs, p.rows / rows, 2}, ScalarType::Int);
    torch::stable::zero_(*turn);
    p.turn = static_cast<int*>(turn->data_ptr());
  } else if (hopper && p.group > 1 && (p.grad_key || p.grad_value)) {
    key_value_sum = aten::empty(query, {2, c.batch * c.kv_heads, int64_t{p.key_tiles} * keys, size}, ScalarType::Float);
    torch::stable::zero_(*key_value_sum);
    p.key_value_sum = static_cast<float*>(key_value_sum->data_ptr());
  }
  OptionGradients option_gradients(c, gradients, p);
  const bool ranged = is_ranged(c, options);
  p.span = backward_span(p, size, ranged, deterministic);
  const BackwardLaunch launch = options_used ? (bf16 ? sm80_options_backward_bf16 : sm80_options_backward_fp16)
                                : hopper     ? (bf16 ? sm90_backward_bf16 : sm90_backward_fp16)
                                             : (bf16 ? sm80_backward_bf16 : sm80_backward_fp16);
  launch(p, ranged, device, stream);
  for (auto* g : {&dq, &dk, &dv})
    if (*g) (*g)->finish();
  option_gradients.finish();
}

}  // namespace

const AttentionBackend cuda_attention{forward, backward};

}  // namespace attnjourney
