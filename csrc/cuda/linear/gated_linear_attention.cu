// CUDA entry of gated linear attention: from tensors to the kernels of kernels/gated/plan.cuh.
#include <torch/csrc/stable/accelerator.h>

#include "cuda/attention/sequences.h"
#include "cuda/refusals.h"
#include "launch_gated.h"
#include "linear_cuda.h"
#include "operands.h"

namespace attnjourney {
namespace {

struct GatedTensors {
  GatedTensors(const GatedCall& c, const GatedInputs& in) : offsets(Indices::offsets(in.cu_seqlens, c.len)) {
    const GatedParams& p = c.params;
    task.batch = static_cast<int>(c.batch), task.sequences = static_cast<int>(c.sequences);
    task.q_heads = static_cast<int>(c.q_heads), task.kv_heads = static_cast<int>(c.kv_heads);
    task.v_heads = static_cast<int>(c.v_heads), task.group = static_cast<int>(p.group);
    task.len = static_cast<int>(c.len);
    task.head_dim = static_cast<int>(p.head_dim), task.v_head_dim = static_cast<int>(p.v_head_dim);
    task.kind = p.gate, task.delta = p.delta, task.scale = p.scale, task.norm_eps = p.norm_eps;
    task.query = operands.rows(in.query), task.key = operands.rows(in.key), task.value = operands.rows(in.value);
    if (in.gate) {
      const Tensor gate = numbers(*in.gate, c.state_dtype, p.gate == Gate::channel);
      task.gate = data_of(gate);
      task.gate_batch = gate.stride(0), task.gate_head = gate.stride(1), task.gate_row = gate.stride(2);
    }
    if (in.beta) {
      const Tensor beta = numbers(*in.beta, c.state_dtype, false);
      task.beta = data_of(beta);
      task.beta_batch = beta.stride(0), task.beta_head = beta.stride(1), task.beta_row = beta.stride(2);
    }
    task.initial_state = operands.dense(in.initial_state);
    task.offsets = Indices::data(offsets);
  }

  void launch(const GatedCall& c, const Tensor& like, bool backward) {
    if (is_empty(c)) return;
    const GatedPlan plan(task, c.state_dtype == ScalarType::Double ? 8 : 4);
    plan.scratch(backward, [&](int64_t count) { return operands.scratch(like, count, c.state_dtype).data_ptr(); });
    const GatedLaunchFunction go = c.dtype == ScalarType::BFloat16 ? sm80_gated_bf16
                                   : c.dtype == ScalarType::Half   ? sm80_gated_fp16
                                   : c.dtype == ScalarType::Float  ? sm80_gated_fp32
                                                                   : sm80_gated_fp64;
    go(plan, backward, current_stream(like.get_device_index()));
  }
  // what no kernel writes: rows behind the last packed sequence, or all where there are no sequences or no values
  void clear_unused(const GatedCall& c, std::initializer_list<Tensor> results) const {
    for (const Tensor& t : results)
      if ((offsets || is_empty(c)) && t.numel()) aten::clear(t);
  }
  static bool is_empty(const GatedCall& c) { return c.sequences == 0 || c.params.v_head_dim == 0; }

  GatedTask task{};
  Operands operands;

 private:
  // gate or beta in compute precision
  Tensor numbers(const Tensor& t, ScalarType dtype, bool channels) {
    const Tensor x = t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
    return operands.keep(channels ? aten::rows_contiguous(x) : x);
  }

  OptionalTensor offsets;
};

}  // namespace

void cuda_gated_forward(const GatedCall& c, const GatedInputs& in, const Tensor& out, const Tensor& state) {
  check_gated_served(c);
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  GatedTensors tensors(c, in);
  tensors.task.out = data_of(out), tensors.task.state = data_of(state);
  tensors.clear_unused(c, {out});
  tensors.launch(c, in.query, false);
}

void cuda_gated_backward(const GatedCall& c, const GatedInputs& in, const Tensor& grad_out,
                         const OptionalTensor& grad_state, const GatedGradients& gradients) {
  check_gated_served(c);
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  GatedTensors tensors(c, in);
  GatedTask& t = tensors.task;
  t.grad_out = tensors.operands.rows(grad_out), t.grad_state = tensors.operands.dense(grad_state);
  const auto& [grad_query, grad_key, grad_value, grad_gate, grad_beta, grad_initial_state] = gradients;
  t.grad_query = data_of(grad_query), t.grad_key = data_of(grad_key), t.grad_value = data_of(grad_value);
  t.grad_gate = data_of(grad_gate), t.grad_beta = data_of(grad_beta);
  t.grad_initial_state = data_of(grad_initial_state);
  tensors.clear_unused(c, {grad_query, grad_key, grad_value, grad_gate, grad_beta});
  tensors.launch(c, in.query, true);
}

}  // namespace attnjourney
