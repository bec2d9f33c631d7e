// CUDA entry of attention: what is served, the launches, and the registration.
#include <torch/csrc/stable/accelerator.h>

#include <cmath>

#include "../attention_operators.h"
#include "device.h"
#include "layout.h"

namespace attnjourney {
namespace {

void check_served(const AttentionCall& c, const AttentionOptions& options, bool backward) {
  const auto unserved = [](const char* name, const char* what) {
    check_runtime(false, name, ": expected ", what, " on CUDA: no kernel serves anything else there yet");
  };
  if (c.dtype != ScalarType::BFloat16 && c.dtype != ScalarType::Half)
    check_runtime(false, "query: expected dtype torch.bfloat16 or torch.float16 on CUDA, got ", dtype_text(c.dtype));
  if (options.attn_mask) unserved("attn_mask", "None");
  if (options.dropout_p > 0) unserved("dropout_p", "0");
  if (!(c.params.scale > 0)) unserved("scale", "a positive number");
  const KeyRanges& keys = c.params.keys;
  if (keys.left < KeyRanges::unbounded || keys.prefix || keys.key_length != c.params.kv_len ||
      (keys.right != 0 && keys.right < KeyRanges::unbounded))
    unserved("attn_mask", "is_causal or all keys");
  const auto head_dim = static_cast<int>(std::min<int64_t>(c.params.head_dim, 1 << 20));
  const auto v_head_dim = static_cast<int>(std::min<int64_t>(c.params.v_head_dim, 1 << 20));
  if (backward)
    check_value(backward_size(head_dim, v_head_dim) != 0,
                "query: expected head dimensions of at most 128 in the backward on CUDA, got ", head_dim,
                " (value: ", v_head_dim, ")");
  else
    check_value(forward_size(head_dim, v_head_dim) != 0,
                "query: expected a head_dim of at most 192 and value's of at most 128 on CUDA, got ", head_dim, " and ",
                v_head_dim);
  const int64_t limit = 1 << 30;
  check_value(c.params.q_len < limit && c.params.kv_len < limit && c.batch * c.q_heads < limit,
              "query: expected fewer than 2^30 rows, keys and heads on CUDA");
}

template <class Task>
void describe(Task& p, const AttentionCall& c, const View& q, const View& k, const View& v) {
  p.query = q.data(), p.key = k.data(), p.value = v.data();
  p.query_strides = q.strides, p.key_strides = k.strides, p.value_strides = v.strides;
  p.batch = static_cast<int>(c.batch), p.q_heads = static_cast<int>(c.q_heads);
  p.group = static_cast<int>(c.params.group);
  p.q_len = static_cast<int>(c.params.q_len), p.kv_len = static_cast<int>(c.params.kv_len);
  p.head_dim = static_cast<int>(chunks(c.params.head_dim));
  p.v_head_dim = static_cast<int>(chunks(c.params.v_head_dim));
  p.offset = static_cast<int>(c.params.keys.offset);
  p.scale_log2 = static_cast<float>(c.params.scale * 1.4426950408889634);
}

void forward(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options, Tensor& out,
             Tensor& lse) {
  const AttentionCall c = check_attention(query, key, value, options);
  check_served(c, options, false);
  if (c.batch * c.q_heads * c.params.q_len == 0) return;
  if (c.params.kv_len == 0) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -INFINITY);
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Device device = current_device(query);
  const cudaStream_t stream = current_stream(device.index);
  const View q = view_of(c, query, c.q_heads), k = view_of(c, key, c.kv_heads), v = view_of(c, value, c.kv_heads);
  Output o(c, out, c.q_heads);
  ForwardTask p{};
  describe(p, c, q, k, v);
  p.out = o.data(), p.out_strides = o.strides(), p.lse = static_cast<float*>(lse.data_ptr());
  const bool bf16 = c.dtype == ScalarType::BFloat16, hopper = device.capability == 90;
  OptionalTensor counter;
  if (hopper) p.counter = tile_counter(query, device.index, stream, counter);
  const ForwardLaunch launch =
      hopper ? (bf16 ? sm90_forward_bf16 : sm90_forward_fp16) : (bf16 ? sm80_forward_bf16 : sm80_forward_fp16);
  launch(p, c.params.keys.right == 0, device, stream);
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
  if (c.batch * c.q_heads * c.params.q_len * c.params.kv_len == 0) {  // nobody reads, nobody is read
    for (const OptionalTensor* g : {&gradients.query, &gradients.key, &gradients.value})
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
  std::optional<Output> dq, dk, dv;
  BackwardTask p{};
  describe(p, c, q, k, v);
  p.out = o.data(), p.out_strides = o.strides, p.grad_out = d_out.data(), p.grad_out_strides = d_out.strides;
  p.lse = static_cast<const float*>(dense_lse.data_ptr());
  p.grad_lse = dense_grad_lse ? static_cast<const float*>(dense_grad_lse->data_ptr()) : nullptr;
  const auto output = [&](std::optional<Output>& to, const OptionalTensor& t, int64_t heads, void*& data, Strides& s) {
    if (!t) return;
    to.emplace(c, *t, heads);
    data = to->data(), s = to->strides();
  };
  output(dq, gradients.query, c.q_heads, p.grad_query, p.grad_query_strides);
  output(dk, gradients.key, c.kv_heads, p.grad_key, p.grad_key_strides);
  output(dv, gradients.value, c.kv_heads, p.grad_value, p.grad_value_strides);

  const int size = backward_size(p.head_dim, p.v_head_dim), rows = backward_rows(size);
  const bool bf16 = c.dtype == ScalarType::BFloat16, hopper = device.capability == 90;
  p.kv_heads = static_cast<int>(c.kv_heads), p.scale = static_cast<float>(c.params.scale);
  p.rows = (p.q_len + rows - 1) / rows * rows;
  p.key_tiles = (p.kv_len + backward_keys - 1) / backward_keys;
  const int64_t pairs = c.batch * c.q_heads;
  const Tensor sum = aten::empty(query, {pairs, p.rows, size}, ScalarType::Float);
  const Tensor stats = aten::empty(query, {2, pairs, p.rows}, ScalarType::Float);
  p.query_sum = static_cast<float*>(sum.data_ptr());
  p.lse2 = static_cast<float*>(stats.data_ptr()), p.delta = p.lse2 + pairs * p.rows;
  OptionalTensor key_value_sum;
  if (hopper && p.group > 1 && (p.grad_key || p.grad_value)) {
    key_value_sum =
        aten::empty(query, {2, c.batch * c.kv_heads, int64_t{p.key_tiles} * backward_keys, size}, ScalarType::Float);
    torch::stable::zero_(*key_value_sum);
    p.key_value_sum = static_cast<float*>(key_value_sum->data_ptr());
  }
  const bool causal = c.params.keys.right == 0;
  p.span = backward_span(p, size, causal, false);
  const BackwardLaunch launch =
      hopper ? (bf16 ? sm90_backward_bf16 : sm90_backward_fp16) : (bf16 ? sm80_backward_bf16 : sm80_backward_fp16);
  launch(p, causal, device, stream);
  for (auto* g : {&dq, &dk, &dv})
    if (*g) (*g)->finish();
}

const AttentionBackend cuda_attention{forward, backward};

std::tuple<Tensor, Tensor> forward_operator(const Tensor& query, const Tensor& key, const Tensor& value,
                                            OptionalTensor attn_mask, double dropout_p, bool is_causal,
                                            std::optional<double> scale, bool enable_gqa, OptionalTensor dropout_seed) {
  return attention_forward(cuda_attention, query, key, value,
                           {std::move(attn_mask), dropout_p, is_causal, scale, enable_gqa, std::move(dropout_seed)});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_operator(
    const Tensor& grad_out, OptionalTensor grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    OptionalTensor attn_mask, const Tensor& out, const Tensor& lse, double dropout_p, bool is_causal,
    std::optional<double> scale, bool enable_gqa, OptionalTensor dropout_seed, int64_t need) {
  return attention_backward(cuda_attention, grad_out, grad_lse, query, key, value,
                            {std::move(attn_mask), dropout_p, is_causal, scale, enable_gqa, std::move(dropout_seed)},
                            out, lse, need);
}

}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&attnjourney::forward_operator));
  m.impl("attention_backward", TORCH_BOX(&attnjourney::backward_operator));
}
