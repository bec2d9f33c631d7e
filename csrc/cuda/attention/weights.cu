// CUDA entry of attention_weights: the weights of chosen rows and heads.
#include <torch/csrc/stable/accelerator.h>

#include "attention_cuda.h"
#include "cuda/device.h"
#include "options.h"
#include "sequences.h"
#include "weights_launch.h"

namespace attnjourney {
namespace {

// Numbers of rows or heads on the query's device. Those that come on the CPU are checked; those on the device are not,
// since that would wait for it: what is not there gets weights of 0.
Tensor chosen(const char* name, const Tensor& t, int64_t size, const Tensor& query) {
  const Tensor dense = aten::contiguous(t);
  if (dense.device() == query.device()) return dense;
  check_value(dense.is_cpu(), name, ": expected a tensor on the CPU or on the device of query");
  const auto* x = static_cast<const int64_t*>(dense.data_ptr());
  for (int64_t i = 0; i < dense.numel(); i++)
    check_value(x[i] >= 0 && x[i] < size, name, ": expected numbers from 0 to ", size - 1, ", got ", x[i]);
  Tensor moved = aten::empty(query, {dense.numel()}, ScalarType::Long);
  torch::stable::copy_(moved, dense);
  return moved;
}

WeightsOperand operand(const AttentionCall& c, const Tensor& t, const HeadMap& map) {
  WeightsOperand x{t.data_ptr(), {}, map.head_stride, t.stride(c.rank - 2), static_cast<int>(map.head_div)};
  for (int d = 0; d < c.batch_dims; d++) x.batch[d] = map.batch_stride[d];
  return x;
}

template <class C>
void write(const WeightsCall& w, const Tensor& out, const Tensor& rows, const Tensor& heads,
           void (*launch)(const WeightsTask<C>&, cudaStream_t)) {
  const AttentionCall& c = w.call;
  const Tensor &query = c.args.query, &key = c.args.key;
  const Indices indices(c);
  const OptionInputs<float> inputs(c);
  WeightsTask<C> p{};
  describe_sequences(p, c, indices);
  p.scores = inputs.scores();
  if (p.scores.mask_kind == MaskElement::same) p.scores.mask_bytes = static_cast<int>(query.element_size());
  p.query = operand(c, query, c.query_map), p.key = operand(c, key, c.key_map);
  p.lse = static_cast<const C*>(w.lse.data_ptr()), p.out = out.data_ptr();
  p.stats = w.stats ? static_cast<const RowStats<C>*>(w.stats->data_ptr()) : nullptr;
  const OptionalTensor slopes = per_head(c.args.options.alibi_slopes, {c.batch, c.q_heads}, ScalarType::Double, query);
  if (slopes) p.slopes = static_cast<const double*>(slopes->data_ptr());
  p.rows = static_cast<const int64_t*>(rows.data_ptr()), p.heads = static_cast<const int64_t*>(heads.data_ptr());
  p.batch = static_cast<int>(c.batch), p.q_heads = static_cast<int>(c.q_heads);
  p.n_rows = static_cast<int>(rows.numel()), p.n_heads = static_cast<int>(heads.numel());
  p.head_dim = static_cast<int>(c.params.head_dim);
  const ScoreUnit unit = score_unit(c);
  p.unit = static_cast<C>(unit.scores), p.exponent = static_cast<C>(unit.exponents);
  p.scale = static_cast<C>(c.params.scale * unit.scores),
  p.softcap = static_cast<C>(c.params.modifier.softcap * unit.scores);
  if (p.softcap > 0) p.cap_factor = static_cast<C>(c.params.scale / c.params.modifier.softcap);
  launch(p, current_stream(current_device(query).index));
}

}  // namespace

void cuda_attention_weights(const WeightsCall& w, const Tensor& out) {
  const AttentionCall& c = w.call;
  const Tensor& query = c.args.query;
  const int64_t limit = 1 << 28;
  check_value(c.params.q_len < limit && c.params.kv_len < limit && c.batch * c.q_heads < limit &&
                  w.rows.numel() < limit && w.heads.numel() < limit,
              "query: expected fewer than 2^28 rows, keys and heads on CUDA");
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Tensor rows = chosen("rows", w.rows, c.params.q_len, query);
  const Tensor heads = chosen("heads", w.heads, c.q_heads, query);
  if (out.numel() == 0) return;
  if (c.dtype == ScalarType::BFloat16) return write(w, out, rows, heads, attention_weights_bf16);
  if (c.dtype == ScalarType::Half) return write(w, out, rows, heads, attention_weights_fp16);
  if (c.dtype == ScalarType::Float) return write(w, out, rows, heads, attention_weights_fp32);
  write(w, out, rows, heads, attention_weights_fp64);
}

}  // namespace attnjourney
