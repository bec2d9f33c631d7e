// CUDA entry of the lightning indexer: from tensors to the kernels of kernels/sparse.
#include <torch/csrc/stable/accelerator.h>

#include "cuda/attention/per_head.h"
#include "cuda/attention/sequences.h"
#include "cuda/refusals.h"
#include "launch_indexer.h"
#include "launch_sparse.h"
#include "sparse_cuda.h"
#include "sparse_tensors.h"

namespace attnjourney {
namespace {

template <class Launches>
const Launches& of_dtype(const IndexerCall& c, const Launches& bf16, const Launches& fp16, const Launches& fp32,
                         const Launches& fp64) {
  return c.dtype == ScalarType::BFloat16 ? bf16
         : c.dtype == ScalarType::Half   ? fp16
         : c.dtype == ScalarType::Float  ? fp32
                                         : fp64;
}
const IndexerLaunches& launches_of(const IndexerCall& c) {
  return of_dtype(c, sm80_indexer_bf16, sm80_indexer_fp16, sm80_indexer_fp32, sm80_indexer_fp64);
}
int number_size(const IndexerCall& c) { return c.score_dtype == ScalarType::Double ? 8 : 4; }

// Columns of the kernels on tensor cores that take heads of these, 0: none.
int columns_of(const Tensor& query, const Tensor& key, std::initializer_list<int> sizes) {
  const int64_t dim = query.size(-1);
  if (query.element_size() != 2 || dim % 8 != 0 || !in_whole_chunks(key)) return 0;
  for (const int size : sizes)
    if (dim <= size) return size;
  return 0;
}

// What all calls give their kernels.
struct IndexerProblem : KeptTensors {
  explicit IndexerProblem(const IndexerCall& c, const IndexerInputs& in)
      : device(current_device(in.query)),
        stream(current_stream(device.index)),
        key(keep(aten::rows_contiguous(in.key))) {
    choice.columns = columns_of(in.query, key, {64, 128});
    query = rows_of(in.query, choice.columns > 0);
    weights = keep(*per_head(in.weights, {c.batch, c.params.heads, c.params.q_len}, c.score_dtype, in.query));
  }
  SparseTask task(const IndexerCall& c, const Tensor& q, const Tensor& k, const Tensor& names, double scale) {
    SparseTask t{};
    const bool heads = k.dim() == 4;
    const Tensor dense = keep(aten::rows_contiguous(names));
    t.params.q_len = c.params.q_len, t.params.kv_len = c.params.kv_len, t.params.head_dim = q.size(3);
    t.batch = static_cast<int>(c.batch), t.kv_heads = static_cast<int>(heads ? k.size(1) : 1);
    t.group = static_cast<int>(t.kv_heads > 0 ? q.size(1) / t.kv_heads : 0), t.params.group = t.group;
    t.params.index_count = names.size(2), t.params.scale = scale, t.score_scale = scale * log2_e;
    t.query = q.data_ptr(), t.key = k.data_ptr(), t.q = strides_of(q), t.k = strides_of(k);
    t.indices = dense.data_ptr(), t.wide = dense.scalar_type() == ScalarType::Long;
    t.names = {dense.stride(0), 0, dense.stride(1)}, t.blocks = static_cast<int>(c.params.q_len);
    return t;
  }
  Device device;
  cudaStream_t stream;
  Tensor key, query, weights;
  IndexerChoice choice{};
};

// Whether the kernels of four rows of query, or of one, take so many heads; else ordinary arithmetic does.
void choose_topk(IndexerChoice& choice, const IndexerParams& p) {
  const int64_t heads = (p.heads + 15) / 16 * 16;
  const auto bytes = [&](int64_t rows, int64_t keys) {
    return (rows * heads + 2 * keys) * choice.columns * 2 + rows * (heads + 2 * keys) * 4;
  };
  if (p.q_len >= 4 && bytes(4, 64) <= kSmallShared) return;
  choice.one = true;
  if (bytes(1, 128) > kSmallShared) choice.columns = 0;
}

}  // namespace

void cuda_indexer_topk(const IndexerCall& c, const IndexerInputs& in, const OptionalTensor& key_lengths,
                       const IndexerResults& results) {
  check_indexer_served(c, c.params.topk);
  if (c.batch * c.params.q_len == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  IndexerProblem p(c, in);
  choose_topk(p.choice, c.params);
  const OptionalTensor lengths = Indices::int32(key_lengths);
  TopkTask t{};
  t.params = c.params, t.batch = static_cast<int>(c.batch);
  t.query = p.query.data_ptr(), t.key = p.key.data_ptr(), t.weights = p.weights.data_ptr();
  t.q = strides_of(p.query), t.k = strides_of(p.key), t.key_lengths = Indices::data(lengths);
  t.indices = static_cast<int*>(results.indices.data_ptr()), t.scores = results.scores.data_ptr();
  const IndexerLaunches& launches = launches_of(c);
  const TopkPlan plan = launches.plan(c.params, t.batch, p.choice, 2 * p.device.multiprocessors, kSparseWorkspace);
  t.list_scores = p.scratch(in.query, plan.lists * plan.capacity, c.score_dtype).data_ptr();
  const auto numbers = [&](int64_t count) {
    return static_cast<int*>(p.scratch(in.query, count, ScalarType::Int).data_ptr());
  };
  t.list_indices = numbers(plan.lists * plan.capacity), t.list_counts = numbers(plan.lists);
  launches.topk(t, plan, p.choice, p.stream);
}

void cuda_indexer_loss(const IndexerCall& c, const IndexerInputs& in, const IndexerTarget& target, const Tensor& loss,
                       const Tensor& grad_scores) {
  check_indexer_served(c, target.indices.size(2));
  check_target_served(target);
  const int64_t rows = c.batch * c.params.q_len;
  if (rows == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  IndexerProblem p(c, in);
  const Tensor key = p.keep(aten::rows_contiguous(target.key));
  p.choice.target = columns_of(target.query, key, {128, 256, kLatentDim});
  const Tensor query = p.rows_of(target.query, p.choice.target > 0);
  IndexerTask t{};
  t.index = p.task(c, p.query, p.key, target.indices, in.scale);
  t.attention = p.task(c, query, key, target.indices, target.scale);
  t.attention.lse = p.scratch(in.query, rows * query.size(1), c.score_dtype).data_ptr();
  t.attention.stats = p.scratch(in.query, 2 * rows * query.size(1), c.score_dtype).data_ptr();
  t.weights = p.weights.data_ptr();
  t.target = p.scratch(in.query, grad_scores.numel(), c.score_dtype).data_ptr();
  t.loss = loss.data_ptr(), t.grad_scores = grad_scores.data_ptr();
  launches_of(c).loss(t, p.choice, p.stream);
}

void cuda_indexer_loss_backward(const IndexerCall& c, const IndexerInputs& in, const Tensor& indices,
                                const Tensor& grad_loss, const Tensor& grad_scores, const IndexerGradients& gradients) {
  check_indexer_served(c, indices.size(2));
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  if (c.batch * c.params.q_len * c.params.heads * c.params.kv_len * indices.size(2) == 0) {
    for (const OptionalTensor* g : {&gradients.query, &gradients.key, &gradients.weights})
      if (*g) aten::clear(**g);
    return;
  }
  IndexerProblem p(c, in);
  IndexerTask t{};
  t.index = p.task(c, p.query, p.key, indices, in.scale);
  t.weights = p.weights.data_ptr(), t.grad_loss = grad_loss.data_ptr();
  t.grad_scores = grad_scores.data_ptr();
  const IndexerLaunches& launches = launches_of(c);
  if (gradients.query || gradients.weights) {
    if (gradients.query) t.index.grad_query = gradients.query->data_ptr();
    Tensor sums = gradients.weights ? *gradients.weights : p.weights;
    if (gradients.weights && sums.scalar_type() != c.score_dtype)
      sums = p.keep(aten::empty(in.query, sums.sizes(), c.score_dtype));
    if (gradients.weights) t.grad_weights = sums.data_ptr();
    launches.query_gradient(t, p.choice, p.stream);
    if (gradients.weights && sums.scalar_type() != gradients.weights->scalar_type()) {
      Tensor to = *gradients.weights;
      torch::stable::copy_(to, sums);
    }
  }
  if (!gradients.key) return;
  const Tensor& to = *gradients.key;
  const SparseParts parts(t.index, 1, number_size(c), kSparseWorkspace);
  SparsePairs pairs = pairs_of<SparsePairs>(p, in.query, parts, 1, c.score_dtype);
  const bool half = to.element_size() == 2;
  pairs.key = half ? p.scratch(in.query, to.numel(), c.score_dtype).data_ptr() : to.data_ptr();
  launches.key_gradient(t, pairs, parts, p.choice, p.stream);
  if (half)
    of_dtype(c, sm80_sparse_bf16, sm80_sparse_fp16, sm80_sparse_fp32, sm80_sparse_fp64)
        .round(static_cast<const float*>(pairs.key), to.data_ptr(), to.numel(), p.stream);
}

}  // namespace attnjourney
