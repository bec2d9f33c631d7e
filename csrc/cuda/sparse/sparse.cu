// CUDA entry of token-sparse attention: from tensors to the kernels of kernels/sparse.
#include "sparse_cuda.h"

#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "cuda/attention/per_head.h"
#include "cuda/attention/sequences.h"
#include "cuda/refusals.h"
#include "launch_sparse.h"
#include "sparse_tensors.h"

namespace attnjourney {
namespace {

// A call as the kernels take it. Tensors that they read live as long as this.
class SparseProblem : public KeptTensors {
 public:
  SparseProblem(const SparseCall& c, const SparseInputs& in) : device(current_device(in.query)) {
    const Tensor key = keep(aten::rows_contiguous(in.key)), value = keep(aten::rows_contiguous(in.value));
    const bool latent = is_sparse_latent(c, in), chunked = in.query.element_size() == 2 && c.params.head_dim % 8 == 0 &&
                                                           in_whole_chunks(key) && in_whole_chunks(value);
    const int64_t rows = std::min(c.params.rows, std::max<int64_t>(1, c.params.q_len));
    const int wide = sparse_columns(static_cast<int>(c.params.head_dim), static_cast<int>(c.params.v_head_dim));
    choice = {.columns = !chunked ? 0
                         : latent ? kLatentDim
                                  : wide,
              .latent = latent,
              .many = c.params.group * rows > 16,
              .small = device.small()};
    const Tensor query = rows_of(in.query);
    const Tensor indices = keep(aten::rows_contiguous(in.indices));
    task.params = c.params, task.params.rows = rows;
    task.query = query.data_ptr(), task.key = key.data_ptr(), task.value = value.data_ptr();
    task.q = strides_of(query), task.k = strides_of(key), task.v = strides_of(value);
    task.indices = indices.data_ptr(), task.wide = indices.scalar_type() == ScalarType::Long;
    const bool own = c.indices_per_head;
    task.names = {indices.stride(0), own && c.kv_heads > 1 ? indices.stride(1) : 0, indices.stride(own ? 2 : 1)};
    lengths_ = Indices::int32(in.key_lengths);
    task.key_lengths = Indices::data(lengths_);
    task.batch = static_cast<int>(c.batch), task.kv_heads = static_cast<int>(c.kv_heads);
    task.group = static_cast<int>(c.params.group), task.blocks = static_cast<int>(c.blocks);
    task.score_scale = c.params.scale * log2_e;
    const double softcap = c.params.modifier.softcap;
    if (softcap > 0) task.cap = softcap * log2_e, task.cap_factor = c.params.scale / softcap;
    const OptionalTensor sinks = per_head(in.sinks, {c.batch, c.q_heads}, c.lse_dtype, in.query);
    if (sinks) task.sinks = keep(*sinks).data_ptr();
    index_heads = own ? task.kv_heads : 1;
    stream = current_stream(device.index);
  }
  void results(const SparseResults& r) {
    task.out = r.out.data_ptr(), task.lse = r.lse.data_ptr(), task.stats = r.stats.data_ptr();
  }
  Tensor rows_of(const Tensor& t) { return KeptTensors::rows_of(t, choice.columns > 0); }

  Device device;
  SparseTask task{};
  SparseChoice choice{};
  int index_heads = 1;
  cudaStream_t stream = nullptr;

 private:
  OptionalTensor lengths_;
};

const SparseLaunches& launches_of(const SparseCall& c) {
  return c.dtype == ScalarType::BFloat16 ? sm80_sparse_bf16
         : c.dtype == ScalarType::Half   ? sm80_sparse_fp16
         : c.dtype == ScalarType::Float  ? sm80_sparse_fp32
                                         : sm80_sparse_fp64;
}

// Gradients of key and value: sums in the type of the arithmetic, which of 16-bit dtypes are rounded last.
void key_gradients(const SparseCall& c, SparseProblem& p, const Tensor& like, const SparseGradients& gradients,
                   const SparseLaunches& launches) {
  const bool half = like.element_size() == 2;
  const int number_size = c.lse_dtype == ScalarType::Double ? 8 : 4;
  const SparseParts parts(p.task, p.index_heads, number_size, kSparseWorkspace);
  SparsePairs pairs = pairs_of<SparsePairs>(p, like, parts, p.index_heads, c.lse_dtype);
  const auto sums = [&](const OptionalTensor& t) {
    if (!t) return static_cast<void*>(nullptr);
    return half ? p.scratch(like, t->numel(), c.lse_dtype).data_ptr() : t->data_ptr();
  };
  pairs.key = sums(gradients.key), pairs.value = sums(gradients.value);
  launches.key_gradients(p.task, pairs, parts, p.choice, p.stream);
  if (!half) return;
  if (gradients.key)
    launches.round(static_cast<const float*>(pairs.key), gradients.key->data_ptr(), gradients.key->numel(), p.stream);
  if (gradients.value)
    launches.round(static_cast<const float*>(pairs.value), gradients.value->data_ptr(), gradients.value->numel(),
                   p.stream);
}

}  // namespace

void cuda_sparse_forward(const SparseCall& c, const SparseInputs& in, const SparseResults& results) {
  check_sparse_served(c, in);
  if (c.batch * c.q_heads * c.params.q_len == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  SparseProblem p(c, in);
  p.results(results);
  p.task.splits = sparse_splits(p.task, p.device.multiprocessors);
  if (p.task.splits > 1) {
    const int64_t rows = p.task.splits * sparse_rows(p.task);
    p.task.part_out = p.scratch(in.query, rows * c.params.v_head_dim, c.lse_dtype).data_ptr();
    p.task.part_stats = p.scratch(in.query, 2 * rows, c.lse_dtype).data_ptr();
  }
  launches_of(c).forward(p.task, p.choice, p.stream);
}

void cuda_sparse_backward(const SparseCall& c, const SparseInputs& in, const SparseSaved& saved,
                          const SparseGradients& gradients) {
  check_sparse_served(c, in);
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  const bool rows = c.batch * c.q_heads * c.params.q_len > 0,
             pairs = rows && c.params.kv_len * c.params.index_count > 0;
  for (const OptionalTensor* t : {&gradients.key, &gradients.value})
    if (*t && !pairs) aten::clear(**t);
  if (gradients.sinks && !rows) aten::clear(*gradients.sinks);
  if (!rows) return;
  SparseProblem p(c, in);
  p.results(saved.results);
  const Tensor grad_out = p.rows_of(saved.grad_out);
  p.task.grad_out = grad_out.data_ptr(), p.task.g = strides_of(grad_out);
  if (saved.grad_lse) p.task.grad_lse = saved.grad_lse->data_ptr();
  p.task.delta = p.scratch(in.query, c.batch * c.q_heads * c.params.q_len, c.lse_dtype).data_ptr();
  const SparseLaunches& launches = launches_of(c);
  launches.delta(p.task, p.stream);
  if (gradients.query) {
    p.task.grad_query = gradients.query->data_ptr();
    launches.query_gradient(p.task, p.choice, p.stream);
  }
  if (gradients.sinks) {
    const Tensor& to = *gradients.sinks;
    const Tensor sums = to.scalar_type() == c.lse_dtype ? to : aten::empty(to, to.sizes(), c.lse_dtype);
    p.task.grad_sinks = sums.data_ptr(), p.task.shared_sinks = to.dim() == 1;
    launches.sinks(p.task, to.numel(), p.stream);
    Tensor target = to;
    if (to.scalar_type() != c.lse_dtype) torch::stable::copy_(target, sums);
  }
  if (pairs && (gradients.key || gradients.value)) key_gradients(c, p, in.query, gradients, launches);
}

}  // namespace attnjourney
