// CUDA entry of attention over numbers in e4m3: Hopper's own kernel, or a refusal. Other GPUs have none: what the
// numbers stand for in 16 bits is attention's.
#include <torch/csrc/stable/accelerator.h>

#include <cmath>

#include "attention_cuda.h"
#include "cuda/device.h"
#include "cuda/kernels/sm90/fp8_task.cuh"
#include "options.h"
#include "task.h"

namespace attnjourney {
namespace {

// Scales of a tensor with `own` heads as a kernel over `heads` of them reads them; `held` keeps them alive.
Fp8Scale scale_of(const Tensor& scales, int64_t own, int64_t heads, OptionalTensor& held) {
  held = scales;
  const int64_t repeats = own > 0 ? heads / own : 1;
  if (repeats > 1 && scales.size(1) > 1) {  // key has fewer heads than value, or the other way round
    const int64_t blocks = scales.size(2);
    const std::vector<int64_t> sizes{scales.size(0), own, repeats, blocks};
    held = aten::empty(scales, {scales.size(0), heads, blocks});
    Tensor whole = aten::strided_view(*held, sizes, std::vector<int64_t>{heads * blocks, repeats * blocks, blocks, 1});
    torch::stable::copy_(whole, aten::strided_view(scales, sizes,
                                                   std::vector<int64_t>{stride_of(scales, 0), scales.stride(1), 0,
                                                                        stride_of(scales, 2)}));
  }
  return {.data = static_cast<const float*>(held->data_ptr()),
          .batch = stride_of(*held, 0),
          .head = stride_of(*held, 1),
          .block = stride_of(*held, 2)};
}

void without_keys(const AttentionCall& c, const AttentionResults& results) {
  const AttentionOptions& o = c.args.options;
  aten::clear(results.out);
  Tensor lse = results.lse;
  torch::stable::fill_(lse, -INFINITY);
  if (c.batch * c.q_heads * c.params.q_len == 0 || !o.sinks) return;
  const OptionalTensor sinks = per_head(o.sinks, {c.batch, c.q_heads}, ScalarType::Float, c.args.query);
  torch::stable::copy_(lse, torch::stable::view(*sinks, {c.batch, c.q_heads, 1}));
}

}  // namespace

void cuda_fp8_forward(const AttentionCall& c, const AttentionResults& results) {
  const auto& [query, key, value, options, fp8] = c.args;
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Device device = current_device(query);
  check_runtime(device.capability == 90,
                "query: expected a GPU of compute capability 9.0 for dtype torch.float8_e4m3fn, got ",
                device.capability / 10, ".", device.capability % 10,
                ": attention takes what the numbers stand for in bfloat16 or float16");
  if (c.batch * c.q_heads * c.params.q_len == 0 || c.params.kv_len == 0) return without_keys(c, results);
  const View q = view_of(c, query, c.q_heads), k = view_of(c, key, c.kv_heads), v = view_of(c, value, c.kv_heads);
  Output o(c, results.out, c.q_heads);
  const Indices indices(c);
  const OptionInputs<float> inputs(c);
  Fp8Task p{};
  describe(p, c, indices, q, k, v);
  p.scores = inputs.scores();
  p.value_columns = p.v_head_dim;
  p.v_head_dim = static_cast<int>(chunks(c.params.v_head_dim, chunk_of(results.out)));
  OptionalTensor held[3];
  p.query_scale = scale_of(fp8->query, query.size(1), c.q_heads, held[0]);
  p.key_scale = scale_of(fp8->key, key.size(1), c.kv_heads, held[1]);
  p.value_scale = scale_of(fp8->value, value.size(1), c.kv_heads, held[2]);
  p.out_type = c.dtype == ScalarType::Float ? Fp8Out::fp32 : c.dtype == ScalarType::Half ? Fp8Out::fp16 : Fp8Out::bf16;
  p.out = o.data(), p.out_strides = o.strides_of(c), p.lse = static_cast<float*>(results.lse.data_ptr());
  p.stats = static_cast<RowStats<float>*>(results.stats.data_ptr());
  sm90_fp8_forward_e4m3(p, current_stream(device.index));
  o.finish();
}

}  // namespace attnjourney
