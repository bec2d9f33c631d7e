// CUDA entry of the derivative of attention's backward in a direction: one kernel for each dtype, with all options.
#include <torch/csrc/stable/accelerator.h>

#include "attention_cuda.h"
#include "cuda/device.h"
#include "cuda/kernels/common/backward_jvp_task.cuh"
#include "cuda/refusals.h"
#include "options.h"
#include "tails.h"
#include "tangents.h"
#include "task.h"

namespace attnjourney {
namespace {

void launch(const BackwardJvpTaskOf<float>& p, ScalarType type, cudaStream_t stream) {
  if (type == ScalarType::Float) return fp32_backward_jvp_float(p, stream);
  (type == ScalarType::BFloat16 ? sm80_backward_jvp_bf16 : sm80_backward_jvp_fp16)(p, stream);
}
void launch(const BackwardJvpTaskOf<double>& p, ScalarType, cudaStream_t stream) {
  fp32_backward_jvp_double(p, stream);
}

template <class Real>
void backward_jvp_in(const AttentionCall& c, const AttentionSaved& saved, const AttentionTangents& given,
                     const AttentionGradients& gradients) {
  const auto& [query, key, value, options, fp8] = c.args;
  if (sees_nothing(c)) {
    for (const OptionalTensor* g : gradients.all())
      if (*g) aten::clear(**g);
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const cudaStream_t stream = current_stream(current_device(query).index);
  const View q = view_of(c, query, c.q_heads), k = view_of(c, key, c.kv_heads), v = view_of(c, value, c.kv_heads);
  const Indices indices(c);
  const OptionInputs<Real> inputs(c);
  const TangentInputs<Real> tangents(c, given);
  BackwardJvpTaskOf<Real> p{};
  describe(p, c, indices, q, k, v);
  p.scores = inputs.scores(), p.scale = static_cast<Real>(c.params.scale), p.kv_heads = static_cast<int>(c.kv_heads);
  tangents.describe(p);

  std::vector<View> views;  // live as long as the task
  const auto rows = [&](const OptionalTensor& t, const void*& data, Strides& strides) {
    if (!t) return;
    views.push_back(view_of(c, *t, c.q_heads));
    data = views.back().data(), strides = views.back().strides;
    if (c.packed) strides.batch = 0;
  };
  rows(saved.out, p.out, p.out_strides);
  rows(saved.grad_out, p.grad_out, p.grad_out_strides);
  rows(given.out, p.out_tangent, p.out_tangent_strides);
  rows(given.grad_out, p.grad_out_tangent, p.grad_out_tangent_strides);
  const auto number = [](const OptionalTensor& t) { return t ? static_cast<const Real*>(t->data_ptr()) : nullptr; };
  const auto dense = [](const OptionalTensor& t) { return t ? OptionalTensor(aten::contiguous(*t)) : t; };
  const OptionalTensor lse = dense(given.lse), grad_lse = dense(given.grad_lse);
  p.stats = static_cast<const RowStats<Real>*>(saved.stats.data_ptr());
  p.grad_lse = number(saved.grad_lse), p.lse_tangent = number(lse), p.grad_lse_tangent = number(grad_lse);

  std::vector<Output> outputs;
  PackedTails tails;
  const auto output = [&](const OptionalTensor& t, int64_t heads, const OptionalTensor& offsets, void*& data,
                          Strides& s) {
    if (!t) return;
    outputs.emplace_back(c, *t, heads);
    if (c.packed) tails.zeros(outputs.back(), c, heads, offsets);
    data = outputs.back().data(), s = outputs.back().strides_of(c);
  };
  output(gradients.query, c.q_heads, indices.cu_q, p.grad_query, p.grad_query_strides);
  output(gradients.key, c.kv_heads, indices.cu_k, p.grad_key, p.grad_key_strides);
  output(gradients.value, c.kv_heads, indices.cu_k, p.grad_value, p.grad_value_strides);
  tails.clear(stream);

  p.tile_rows = 1, p.rows = c.packed ? p.q_len + p.batch : p.q_len;
  p.key_tiles = c.packed ? p.q_len / kOwnRows + p.batch : (p.q_len + kOwnRows - 1) / kOwnRows;
  const int64_t count = (c.packed ? 1 : c.batch) * c.q_heads * p.rows;
  const Tensor changes = aten::empty(query, {count, sizeof(RowChange<Real>) / sizeof(Real)}, c.lse_dtype);
  p.changes = static_cast<RowChange<Real>*>(changes.data_ptr());
  OptionGradients<Real> option_gradients(c, gradients, p, false, true);
  OptionalTensor of_sinks;
  if (p.grad_sinks) {
    of_sinks = aten::empty(query, {3, count}, c.lse_dtype);
    p.reference = static_cast<Real*>(of_sinks->data_ptr()), p.inverse = p.reference + count;
    p.delta = p.inverse + count;
  }
  launch(p, c.dtype, stream);
  for (Output& o : outputs) o.finish();
  option_gradients.finish();
}

}  // namespace

void cuda_attention_backward_jvp(AttentionCall& c, const AttentionSaved& saved, const AttentionTangents& tangents,
                                 const AttentionGradients& gradients) {
  check_served(c, most_tangent_dim);
  (c.lse_dtype == ScalarType::Double ? backward_jvp_in<double> : backward_jvp_in<float>)(c, saved, tangents, gradients);
}

}  // namespace attnjourney
