// CUDA entry of attention's derivative in a direction: one kernel for each dtype, with all options.
#include <torch/csrc/stable/accelerator.h>

#include "attention_cuda.h"
#include "cuda/device.h"
#include "cuda/kernels/common/jvp_task.cuh"
#include "cuda/refusals.h"
#include "tails.h"
#include "tangents.h"
#include "task.h"

namespace attnjourney {
namespace {

void launch(const JvpTask& p, ScalarType type, cudaStream_t stream) {
  if (type == ScalarType::Float) return fp32_jvp_float(p, stream);
  (type == ScalarType::BFloat16 ? sm80_jvp_bf16 : sm80_jvp_fp16)(p, stream);
}
void launch(const JvpTaskOf<double>& p, ScalarType, cudaStream_t stream) { fp32_jvp_double(p, stream); }

template <class Real>
void jvp_in(const AttentionCall& c, const AttentionResults& results, const AttentionTangents& given) {
  const auto& [query, key, value, options, fp8] = c.args;
  Tensor to = *given.out, lse = *given.lse;
  if (sees_nothing(c)) {
    torch::stable::zero_(to);
    torch::stable::zero_(lse);
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const cudaStream_t stream = current_stream(current_device(query).index);
  const View q = view_of(c, query, c.q_heads), k = view_of(c, key, c.kv_heads), v = view_of(c, value, c.kv_heads);
  const View out = view_of(c, results.out, c.q_heads);
  Output o(c, to, c.q_heads);
  const Indices indices(c, true);
  const OptionInputs<Real> inputs(c);
  const TangentInputs<Real> tangents(c, given);
  JvpTaskOf<Real> p{};
  describe(p, c, indices, q, k, v);
  p.scores = inputs.scores(), p.scale = static_cast<Real>(c.params.scale);
  p.out = out.data(), p.out_strides = out.strides;
  if (c.packed) p.out_strides.batch = 0;
  p.stats = static_cast<RowStats<Real>*>(results.stats.data_ptr());
  tangents.describe(p);
  p.out_tangent = o.data(), p.out_tangent_strides = o.strides_of(c);
  p.lse_tangent = static_cast<Real*>(lse.data_ptr());
  if (c.packed) {
    PackedTails tails;
    tails.zeros(o, c, c.q_heads, indices.cu_q);
    tails.fill(lse, 1, Real(0), c, indices.cu_q);
    tails.clear(stream);
  }
  launch(p, c.dtype, stream);
  o.finish();
}

}  // namespace

void cuda_attention_jvp(AttentionCall& c, const AttentionResults& results, const AttentionTangents& tangents) {
  check_served(c, most_tangent_dim);
  (c.lse_dtype == ScalarType::Double ? jvp_in<double> : jvp_in<float>)(c, results, tangents);
}

}  // namespace attnjourney
