// CUDA entry of attention: from tensors to launches.
#include <torch/csrc/stable/accelerator.h>

#include <cmath>
#include <limits>

#include "attention_cuda.h"
#include "cuda/device.h"
#include "cuda/refusals.h"
#include "launches.h"
#include "options.h"
#include "tails.h"
#include "task.h"

namespace attnjourney {
namespace {

AttentionCase case_of(const AttentionCall& c, bool full) {
  return {.type = element_type(c.dtype),
          .head_dim = static_cast<int>(c.params.head_dim),
          .v_head_dim = static_cast<int>(c.params.v_head_dim),
          .q_len = static_cast<int>(c.params.q_len),
          .kv_len = static_cast<int>(c.params.kv_len),
          .full = full};
}

template <class Real>
void forward_in(const AttentionCall& c, const AttentionResults& results) {
  const auto& [query, key, value, options, fp8] = c.args;
  Tensor out = results.out, lse = results.lse, stats = results.stats;
  if (sees_nothing(c)) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -INFINITY);
    torch::stable::zero_(stats);
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Device device = current_device(query);
  const cudaStream_t stream = current_stream(device.index);
  const View q = view_of(c, query, c.q_heads), k = view_of(c, key, c.kv_heads), v = view_of(c, value, c.kv_heads);
  Output o(c, out, c.q_heads);
  const Indices indices(c, true);
  const OptionInputs<Real> inputs(c);
  ForwardTaskOf<Real> p{};
  describe(p, c, indices, q, k, v);
  p.scores = inputs.scores();
  p.out = o.data(), p.out_strides = o.strides_of(c), p.lse = static_cast<Real*>(lse.data_ptr());
  p.stats = static_cast<RowStats<Real>*>(stats.data_ptr());
  if (c.packed) {
    PackedTails tails;
    tails.zeros(o, c, c.q_heads, indices.cu_q);
    tails.fill(lse, 1, -std::numeric_limits<Real>::infinity(), c, indices.cu_q);
    tails.fill(stats, 2, Real(0), c, indices.cu_q);
    tails.clear(stream);
  }
  const AttentionCase which = case_of(c, needs_full_kernels(c));
  choose_forward<Real>(device, which).launch(p, {query, device, stream, which.type, is_ranged(c)});
  o.finish();
}

template <class Real>
void backward_in(const AttentionCall& c, const AttentionSaved& saved, const AttentionGradients& gradients) {
  const auto& [query, key, value, options, fp8] = c.args;
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Device device = current_device(query);
  const cudaStream_t stream = current_stream(device.index);
  const int size = backward_size(c.params.head_dim, c.params.v_head_dim);
  const AttentionCase which = case_of(c, backward_needs_full_kernels(c, device));
  const BackwardKernelOf<Real>& kernel = choose_backward<Real>(device, which);
  if (sees_nothing(c)) {
    for (const OptionalTensor* g : gradients.all())
      if (*g) aten::clear(**g);
    return;
  }
  const View q = view_of(c, query, c.q_heads), k = view_of(c, key, c.kv_heads), v = view_of(c, value, c.kv_heads);
  const View o = view_of(c, saved.out, c.q_heads), d_out = view_of(c, saved.grad_out, c.q_heads);
  const Indices indices(c);
  const OptionInputs<Real> inputs(c);
  std::optional<Output> dq, dk, dv;
  BackwardTaskOf<Real> p{};
  describe(p, c, indices, q, k, v);
  p.scores = inputs.scores();
  p.out = o.data(), p.out_strides = o.strides, p.grad_out = d_out.data(), p.grad_out_strides = d_out.strides;
  if (c.packed) p.out_strides.batch = p.grad_out_strides.batch = 0;
  p.stats = static_cast<const RowStats<Real>*>(saved.stats.data_ptr());
  p.grad_lse = saved.grad_lse ? static_cast<const Real*>(saved.grad_lse->data_ptr()) : nullptr;
  PackedTails tails;
  const auto output = [&](std::optional<Output>& to, const OptionalTensor& t, int64_t heads,
                          const OptionalTensor& offsets, void*& data, Strides& s) {
    if (!t) return;
    to.emplace(c, *t, heads);
    if (c.packed) tails.zeros(*to, c, heads, offsets);
    data = to->data(), s = to->strides_of(c);
  };
  output(dq, gradients.query, c.q_heads, indices.cu_q, p.grad_query, p.grad_query_strides);
  output(dk, gradients.key, c.kv_heads, indices.cu_k, p.grad_key, p.grad_key_strides);
  output(dv, gradients.value, c.kv_heads, indices.cu_k, p.grad_value, p.grad_value_strides);
  tails.clear(stream);

  const auto [rows, keys, scratch_rows, columns] = kernel.tiles(size, device.small());
  const bool deterministic = deterministic_algorithms();
  p.kv_heads = static_cast<int>(c.kv_heads), p.scale = static_cast<Real>(c.params.scale);
  p.rows = c.packed ? (p.q_len / rows + p.batch) * rows : (p.q_len + scratch_rows - 1) / scratch_rows * scratch_rows;
  p.key_tiles = c.packed ? p.kv_len / keys + p.batch : (p.kv_len + keys - 1) / keys;
  p.tile_rows = rows, p.tile_keys = keys;
  const int64_t pairs = c.packed ? c.q_heads : c.batch * c.q_heads;
  const Tensor sum = aten::empty(query, std::vector<int64_t>{pairs, p.rows, columns}, c.lse_dtype);
  const Tensor of_rows = aten::empty(query, std::vector<int64_t>{4, pairs, p.rows}, c.lse_dtype);
  p.query_sum = static_cast<Real*>(sum.data_ptr());
  const int64_t part = pairs * p.rows;
  p.reference = static_cast<Real*>(of_rows.data_ptr()), p.inverse = p.reference + part;
  p.lse2 = p.inverse + part, p.delta = p.lse2 + part;
  OptionalTensor key_value_sum, turn;
  if (deterministic) {
    turn = aten::empty(query, {pairs, p.rows / rows, 2}, ScalarType::Int);
    torch::stable::zero_(*turn);
    p.turn = static_cast<int*>(turn->data_ptr());
  } else if (kernel.one_head_a_block && p.group > 1 && !c.packed && (p.grad_key || p.grad_value)) {
    key_value_sum = aten::empty(query, {2, c.batch * c.kv_heads, int64_t{p.key_tiles} * keys, columns}, c.lse_dtype);
    torch::stable::zero_(*key_value_sum);
    p.key_value_sum = static_cast<Real*>(key_value_sum->data_ptr());
  }
  OptionalTensor query_blocks;
  if (kernel.finishes_short_rows && !deterministic && p.grad_query && p.rows <= kShortRows && p.key_tiles > 0) {
    query_blocks = aten::empty(query, {pairs}, ScalarType::Int);
    p.query_blocks = static_cast<uint32_t*>(query_blocks->data_ptr());
  }
  const bool ranged = is_ranged(c);
  OptionGradients<Real> option_gradients(c, gradients, p, kernel.writes_mask_gradient, ranged);
  p.span = backward_span(p, columns, ranged, deterministic);
  kernel.launch(p, {query, device, stream, which.type, ranged});
  for (auto* g : {&dq, &dk, &dv})
    if (*g) (*g)->finish();
  option_gradients.finish();
}

}  // namespace

void cuda_attention_forward(AttentionCall& c, const AttentionResults& results) {
  check_served(c, most_head_dim(c));
  if (c.args.fp8) return cuda_fp8_forward(c, results);
  if (c.args.options.block_table)
    return (c.lse_dtype == ScalarType::Double ? paged_forward<double> : paged_forward<float>)(c, results);
  (c.lse_dtype == ScalarType::Double ? forward_in<double> : forward_in<float>)(c, results);
}

void cuda_attention_backward(AttentionCall& c, const AttentionSaved& saved, const AttentionGradients& gradients) {
  check_served(c, most_head_dim(c));
  (c.lse_dtype == ScalarType::Double ? backward_in<double> : backward_in<float>)(c, saved, gradients);
}

}  // namespace attnjourney
