// CUDA entry of linear attention: from tensors to the kernels of kernels/linear/plan.cuh.
#include <torch/csrc/stable/accelerator.h>

#include "cuda/refusals.h"
#include "launch_linear.h"
#include "linear_cuda.h"
#include "operands.h"

namespace attnjourney {
namespace {

LinearProblem describe(const LinearCall& c, const LinearInputs& in, const Device& device, Operands& operands) {
  const LinearParams& s = c.params;
  LinearProblem p{};
  p.batch = static_cast<int>(c.batch), p.q_heads = static_cast<int>(c.q_heads);
  p.kv_heads = static_cast<int>(c.kv_heads);
  p.q_len = static_cast<int>(s.q_len), p.kv_len = static_cast<int>(s.kv_len);
  p.head_dim = static_cast<int>(s.head_dim), p.v_head_dim = static_cast<int>(s.v_head_dim);
  p.causal = s.causal, p.normalize = s.normalize, p.eps = s.eps;
  p.number_size = c.state_dtype == ScalarType::Double ? 8 : 4;
  p.chunk = linear_chunk(p.number_size, device.small(), std::max(p.head_dim, p.v_head_dim));
  const auto* blocked = static_cast<const uint8_t*>(operands.dense(in.key_padding_mask));
  p.query = operands.rows(in.query, s.feature_map, s.scale);
  p.key = operands.rows(in.key, s.feature_map, 1, blocked);
  p.value = operands.rows(in.value, FeatureMap::identity, 1, blocked);
  p.initial_state = operands.dense(in.initial_state);
  p.initial_normalizer = operands.dense(in.initial_normalizer);
  p.blocks = 3 * device.multiprocessors;
  return p;
}

void launch(const LinearCall& c, LinearProblem& p, const Tensor& like, Operands& operands, bool backward,
            const Device& device) {
  const int64_t numbers = LinearPlan(p).states(backward);
  if (numbers) p.states = operands.scratch(like, numbers, c.state_dtype).data_ptr();
  const LinearLaunch go = c.dtype == ScalarType::BFloat16 ? sm80_linear_bf16
                          : c.dtype == ScalarType::Half   ? sm80_linear_fp16
                          : c.dtype == ScalarType::Float  ? sm80_linear_fp32
                                                          : sm80_linear_fp64;
  go(p, backward, current_stream(device.index));
}

}  // namespace

void cuda_linear_forward(const LinearCall& c, const LinearInputs& in, const Tensor& out, const Tensor& denominator,
                         const Tensor& state, const Tensor& normalizer) {
  check_linear_served(c);
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  const Device device = current_device(in.query);
  Operands operands;
  LinearProblem p = describe(c, in, device, operands);
  p.out = out.data_ptr(), p.denominator = data_of(denominator);
  p.state = data_of(state), p.normalizer = data_of(normalizer);
  launch(c, p, in.query, operands, false, device);
}

void cuda_linear_backward(const LinearCall& c, const LinearInputs& in, const LinearGradientInputs& grads,
                          const LinearGradients& gradients) {
  check_linear_served(c);
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  const Device device = current_device(in.query);
  Operands operands;
  LinearProblem p = describe(c, in, device, operands);
  p.grad_out = operands.rows(grads.grad_out);
  p.grad_state = operands.dense(grads.grad_state);
  if (p.normalize) {
    p.out = operands.dense(grads.out), p.denominator = operands.dense(grads.denominator);
    p.grad_denominator = operands.dense(grads.grad_denominator);
    p.grad_normalizer = operands.dense(grads.grad_normalizer);
    const int64_t rows = c.batch * c.q_heads * c.params.q_len;
    p.inverse = operands.scratch(in.query, 2 * rows, c.state_dtype).data_ptr();
    p.grad = static_cast<char*>(p.inverse) + rows * p.number_size;
  }
  const auto& [grad_query, grad_key, grad_value, grad_state, grad_normalizer] = gradients;
  p.grad_query = data_of(grad_query), p.grad_key = data_of(grad_key), p.grad_value = data_of(grad_value);
  p.grad_initial_state = data_of(grad_state), p.grad_initial_normalizer = data_of(grad_normalizer);
  launch(c, p, in.query, operands, true, device);
}

}  // namespace attnjourney
