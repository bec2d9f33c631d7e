// CUDA entry of attention: from tensors to launches. The operators around it are in operators.cu.
#include <torch/csrc/stable/accelerator.h>

#include <cmath>

#include "attention_cuda.h"
#include "cuda/device.h"
#include "fp16x2_backward.h"
#include "fp16x2_forward.h"
#include "options.h"
#include "served.h"
#include "task.h"
#include "tile_kinds.h"

namespace attnjourney {
namespace {

// Picks a kernel and launches it. Holds in `counter` what the kernel needs of its own.
void launch_forward(ForwardTaskOf<double> p, const AttentionCall& c, const AttentionOptions& options,
                    const Device& device, cudaStream_t stream, const Tensor&, OptionalTensor&) {
  fp32_forward_double(p, is_ranged(c, options), device, stream);
}
void launch_forward(ForwardTask p, const AttentionCall& c, const AttentionOptions& options, const Device& device,
                    cudaStream_t stream, const Tensor& query, OptionalTensor& counter) {
  const bool ranged = is_ranged(c, options), options_used = has_options(c, options);
  if (c.dtype == ScalarType::Float) {
    if (device.capability != 90 || options_used || !splits(p)) return fp32_forward_float(p, ranged, device, stream);
    p.counter = tile_counter(query, device.index, stream, counter);
    return fp16x2_forward(p, query, device, stream);
  }
  const bool bf16 = c.dtype == ScalarType::BFloat16;
  const bool hopper = device.capability == 90 && p.kv_len > 0 && hopper_forward(forward_size(p.head_dim, p.v_head_dim));
  if (hopper) p.counter = tile_counter(query, device.index, stream, counter);
  if (hopper && options_used) {
    OptionalTensor memory;
    const TileKinds kinds = tile_kinds(p, p.q_heads, 64, 128, query, stream, memory);
    return (bf16 ? sm90_full_forward_bf16 : sm90_full_forward_fp16)(p, kinds, device, stream);
  }
  const ForwardLaunch launch = options_used ? (bf16 ? sm80_full_forward_bf16 : sm80_full_forward_fp16)
                               : hopper     ? (bf16 ? sm90_forward_bf16 : sm90_forward_fp16)
                                            : (bf16 ? sm80_forward_bf16 : sm80_forward_fp16);
  launch(p, ranged, device, stream);
}

template <class Real>
void forward_in(const AttentionCall& c, const Tensor& query, const Tensor& key, const Tensor& value,
                const AttentionOptions& options, Tensor& out, Tensor& lse) {
  const auto write_nothing_seen = [&] {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -INFINITY);
  };
  if (c.batch * c.q_heads * c.params.q_len == 0 || (c.params.kv_len == 0 && !options.sinks))
    return write_nothing_seen();
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Device device = current_device(query);
  const cudaStream_t stream = current_stream(device.index);
  if (c.packed) write_nothing_seen();  // rows of no sequence
  const View q = view_of(c, query, c.q_heads), k = view_of(c, key, c.kv_heads), v = view_of(c, value, c.kv_heads);
  Output o(c, out, c.q_heads);
  const Indices indices(c, options);
  const OptionInputs<Real> inputs(c, options, query);
  ForwardTaskOf<Real> p{};
  describe(p, c, indices, q, k, v);
  p.scores = inputs.scores();
  if (c.packed) o.clear();
  p.out = o.data(), p.out_strides = o.strides_of(c), p.lse = static_cast<Real*>(lse.data_ptr());
  OptionalTensor counter;
  launch_forward(p, c, options, device, stream, query, counter);
  o.finish();
}

void forward(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options, Tensor& out,
             Tensor& lse) {
  const AttentionCall c = check_attention(query, key, value, options);
  check_served(c, options, false);
  (c.lse_dtype == ScalarType::Double ? forward_in<double> : forward_in<float>)(c, query, key, value, options, out, lse);
}

void launch_backward(const BackwardTaskOf<double>& p, const AttentionCall&, const Device& device, cudaStream_t stream,
                     const Tensor&, bool, bool, bool ranged) {
  fp32_backward_double(p, ranged, device, stream);
}
void launch_backward(const BackwardTask& p, const AttentionCall& c, const Device& device, cudaStream_t stream,
                     const Tensor& query, bool hopper, bool options_used, bool ranged) {
  if (c.dtype == ScalarType::Float && !options_used && splits(p)) return fp16x2_backward(p, query, device, stream);
  const bool bf16 = c.dtype == ScalarType::BFloat16;
  const BackwardLaunch launch = c.dtype == ScalarType::Float ? fp32_backward_float
                                : hopper && options_used ? (bf16 ? sm90_full_backward_bf16 : sm90_full_backward_fp16)
                                : hopper                 ? (bf16 ? sm90_backward_bf16 : sm90_backward_fp16)
                                : options_used           ? (bf16 ? sm80_full_backward_bf16 : sm80_full_backward_fp16)
                                                         : (bf16 ? sm80_backward_bf16 : sm80_backward_fp16);
  launch(p, ranged, device, stream);
}

template <class Real>
void backward_in(const AttentionCall& c, const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query,
                 const Tensor& key, const Tensor& value, const AttentionOptions& options, const Tensor& out,
                 const Tensor& lse, AttentionGradients& gradients) {
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Device device = current_device(query);
  const cudaStream_t stream = current_stream(device.index);
  const int size = backward_size(c.params.head_dim, c.params.v_head_dim);
  const int element = static_cast<int>(query.element_size());
  const bool options_used = backward_takes_options(c, options, device);
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
  const OptionInputs<Real> inputs(c, options, query);
  std::optional<Output> dq, dk, dv;
  BackwardTaskOf<Real> p{};
  describe(p, c, indices, q, k, v);
  p.scores = inputs.scores();
  p.out = o.data(), p.out_strides = o.strides, p.grad_out = d_out.data(), p.grad_out_strides = d_out.strides;
  if (c.packed) p.out_strides.batch = p.grad_out_strides.batch = 0;
  p.lse = static_cast<const Real*>(dense_lse.data_ptr());
  p.grad_lse = dense_grad_lse ? static_cast<const Real*>(dense_grad_lse->data_ptr()) : nullptr;
  const auto output = [&](std::optional<Output>& to, const OptionalTensor& t, int64_t heads, void*& data, Strides& s) {
    if (!t) return;
    to.emplace(c, *t, heads);
    if (c.packed) to->clear();
    data = to->data(), s = to->strides_of(c);
  };
  output(dq, gradients.query, c.q_heads, p.grad_query, p.grad_query_strides);
  output(dk, gradients.key, c.kv_heads, p.grad_key, p.grad_key_strides);
  output(dv, gradients.value, c.kv_heads, p.grad_value, p.grad_value_strides);

  const int rows = element > 2 ? fp32_rows(size, element, device.small()) : backward_rows(size);
  const bool hopper = element == 2 && device.capability == 90 && hopper_backward(size);
  const bool deterministic = deterministic_algorithms();
  p.kv_heads = static_cast<int>(c.kv_heads), p.scale = static_cast<Real>(c.params.scale);
  const int whole = element == 4 ? std::max(rows, fp16x2_rows(size)) : rows;  // kernels in planes have more of them
  p.rows = c.packed ? (p.q_len / rows + p.batch) * rows : (p.q_len + whole - 1) / whole * whole;
  const int keys =
      element > 2 ? fp32_keys(size, element) : backward_keys(size, options_used && !hopper, device.small());
  p.key_tiles = c.packed ? p.kv_len / keys + p.batch : (p.kv_len + keys - 1) / keys;
  p.tile_rows = rows, p.tile_keys = keys;
  const int64_t pairs = c.packed ? c.q_heads : c.batch * c.q_heads;
  const Tensor sum = aten::empty(query, std::vector<int64_t>{pairs, p.rows, size}, c.lse_dtype);
  const Tensor stats = aten::empty(query, std::vector<int64_t>{2, pairs, p.rows}, c.lse_dtype);
  p.query_sum = static_cast<Real*>(sum.data_ptr());
  p.lse2 = static_cast<Real*>(stats.data_ptr()), p.delta = p.lse2 + pairs * p.rows;
  OptionalTensor key_value_sum, turn;
  if (deterministic) {
    turn = aten::empty(query, {pairs, p.rows / rows, 2}, ScalarType::Int);
    torch::stable::zero_(*turn);
    p.turn = static_cast<int*>(turn->data_ptr());
  } else if (hopper && p.group > 1 && !c.packed && (p.grad_key || p.grad_value)) {
    key_value_sum = aten::empty(query, {2, c.batch * c.kv_heads, int64_t{p.key_tiles} * keys, size}, c.lse_dtype);
    torch::stable::zero_(*key_value_sum);
    p.key_value_sum = static_cast<Real*>(key_value_sum->data_ptr());
  }
  OptionalTensor query_blocks;
  if (hopper && !options_used && !deterministic && p.grad_query && p.rows <= kShortRows && p.key_tiles > 0) {
    query_blocks = aten::empty(query, {pairs}, ScalarType::Int);
    p.query_blocks = static_cast<uint32_t*>(query_blocks->data_ptr());
  }
  const bool ranged = is_ranged(c, options);
  OptionGradients<Real> option_gradients(c, gradients, p, hopper, ranged);
  p.span = backward_span(p, size, ranged, deterministic);
  launch_backward(p, c, device, stream, query, hopper, options_used, ranged);
  for (auto* g : {&dq, &dk, &dv})
    if (*g) (*g)->finish();
  option_gradients.finish();
}

void backward(const Tensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query, const Tensor& key,
              const Tensor& value, const AttentionOptions& options, const Tensor& out, const Tensor& lse,
              AttentionGradients& gradients) {
  const AttentionCall c = check_attention(query, key, value, options);
  check_served(c, options, true);
  (c.lse_dtype == ScalarType::Double ? backward_in<double> : backward_in<float>)(c, grad_out, grad_lse, query, key,
                                                                                 value, options, out, lse, gradients);
}

}  // namespace

const AttentionBackend cuda_attention{forward, backward};

}  // namespace attnjourney
