// CUDA entry of packed rows over a paged cache: chunked prefill beside decoding in one call. Sequences of few rows go
// to decoding's kernels, which share their keys out over blocks, all others to attention's; what a sequence has is
// known on the device alone, so both are launched and each leaves the other's sequences out.
#include <torch/csrc/stable/accelerator.h>

#include <limits>

#include "attention_cuda.h"
#include "cuda/decode/decode_cuda.h"
#include "cuda/device.h"
#include "options.h"
#include "tails.h"
#include "task.h"

namespace attnjourney {
namespace {

// Rows of a sequence that are decoding's: see kFewRows in decode/decode_tiling.h.
int few_rows_of(const AttentionCall& c) { return static_cast<int>(std::max<int64_t>(16, 128 / c.params.group)); }

PagedKeys pages_of(const AttentionCall& c, bool chunked) {
  const auto& [query, key, value, options, fp8] = c.args;
  const Tensor& table = *options.block_table;
  return {.table = static_cast<const int*>(table.data_ptr()),
          .blocks = static_cast<int>(key.size(0)),
          .block_size = static_cast<int>(c.params.page_size),
          .max_blocks = static_cast<int>(table.size(1)),
          .key_block = c.params.k_page,
          .value_block = c.params.v_page,
          .key_dim = static_cast<int>(c.params.head_dim),
          .value_dim = static_cast<int>(c.params.v_head_dim),
          .chunked = chunked,
          .few_rows = few_rows_of(c)};
}

void prefill(const ForwardTaskOf<float>& p, const PagedKeys& pages, ScalarType type, cudaStream_t stream) {
  if (type == ScalarType::Float) return fp32_paged_forward_float(p, pages, stream);
  (type == ScalarType::BFloat16 ? sm80_paged_forward_bf16 : sm80_paged_forward_fp16)(p, pages, stream);
}
void prefill(const ForwardTaskOf<double>& p, const PagedKeys& pages, ScalarType, cudaStream_t stream) {
  fp32_paged_forward_double(p, pages, stream);
}

// The tensors of `p` as decoding's kernels take them.
template <class Real>
DecodeTask decode_task(const AttentionCall& c, const ForwardTaskOf<Real>& p, const PagedKeys& pages) {
  DecodeTask d{};
  d.query = p.query, d.key = p.key, d.value = p.value, d.out = p.out, d.lse = p.lse;
  d.q_head = p.query_strides.head, d.q_row = p.query_strides.row;
  d.out_head = p.out_strides.head, d.out_row = p.out_strides.row;
  d.k = {pages.key_block, p.key_strides.head, p.key_strides.row};
  d.v = {pages.value_block, p.value_strides.head, p.value_strides.row};
  d.longest = c.params.kv_len, d.capacity = p.kv_len;
  d.table = pages.table, d.blocks = pages.blocks, d.block_size = pages.block_size, d.max_blocks = pages.max_blocks;
  d.batch = p.batch, d.kv_heads = static_cast<int>(c.kv_heads), d.group = p.group, d.q_len = p.q_len;
  d.head_dim = pages.key_dim, d.v_head_dim = pages.value_dim;
  d.keys = p.keys, d.bottom_right = p.bottom_right;
  describe_scores(d, c.params.scale, c.params.modifier);
  d.scaled_only = !c.params.modifier.on() && !p.scores.slopes;
  d.sinks = p.scores.sinks, d.slopes = p.scores.slopes;
  d.sinks_batch = d.slopes_batch = c.q_heads;
  d.cu_q = p.cu_q, d.cu_k = p.cu_k, d.few_rows = pages.few_rows;
  return d;
}

void decode(const AttentionCall& c, DecodeTask d, bool chunked, ScalarType real, const Device& device,
            cudaStream_t stream) {
  const CudaDecode& kernel = decode_kernel(c.dtype);
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t most = std::min<int64_t>(d.few_rows, d.q_len);                // rows of a sequence
  d.rows = static_cast<int>(d.group * std::min(most, up(d.q_len, d.batch)));  // what is expected of one
  const DecodeTiling tiling = kernel.tiling(d.head_dim, d.v_head_dim, d.rows, chunked);
  const int64_t row_tiles = up(d.group * most, tiling.rows), fixed = row_tiles * d.batch;
  const int64_t through = int64_t{d.group} * d.q_len / tiling.rows + d.batch;
  d.row_tiles = static_cast<int>(through < fixed ? 0 : row_tiles);
  d.tiles = static_cast<int>(std::min(through, fixed));
  d.splits = decode_splits(c.batch * c.kv_heads * up(d.rows, tiling.rows), c.params.kv_len, tiling, device);
  OptionalTensor parts;  // outputs, references and sums of every split
  if (d.splits > 1) {
    const int64_t rows = c.kv_heads * d.tiles * d.splits * tiling.rows;
    parts = aten::empty(c.args.query, {rows * (2 + c.params.v_head_dim)}, real);
    d.part_stats = parts->data_ptr();
    d.part_out = static_cast<char*>(d.part_stats) + rows * 2 * parts->element_size();
  }
  kernel.launch(d, chunked, stream);
}

bool in_chunks_of_16_bytes(const Tensor& t) {
  int64_t all = static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.data_ptr()));
  for (int64_t d = 0; d < 3; d++) all |= stride_of(t, d) * t.element_size();
  return (all | t.size(3) * t.element_size()) % 16 == 0;
}

}  // namespace

template <class Real>
void paged_forward(const AttentionCall& c, const AttentionResults& results) {
  const auto& [query, key, value, options, fp8] = c.args;
  Tensor out = results.out, lse = results.lse;
  if (sees_nothing(c)) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -INFINITY);
    return;
  }
  const torch::stable::accelerator::DeviceGuard guard(query.get_device_index());
  const Device device = current_device(query);
  const cudaStream_t stream = current_stream(device.index);
  const bool chunked = in_chunks_of_16_bytes(key) && in_chunks_of_16_bytes(value);
  const View q = view_of(c, query, c.q_heads);
  const auto rows_of = [](const Tensor& t) { return View{t, {0, stride_of(t, 1), stride_of(t, 2)}}; };
  Output o(c, out, c.q_heads);
  const Indices indices(c, true);
  const OptionInputs<Real> inputs(c);
  ForwardTaskOf<Real> p{};
  describe(p, c, indices, q, rows_of(key), rows_of(value));
  p.scores = inputs.scores();
  p.out = o.data(), p.out_strides = o.strides_of(c), p.lse = static_cast<Real*>(lse.data_ptr());
  p.stats = static_cast<RowStats<Real>*>(results.stats.data_ptr());
  PackedTails tails;
  tails.zeros(o, c, c.q_heads, indices.cu_q);
  tails.fill(lse, 1, -std::numeric_limits<Real>::infinity(), c, indices.cu_q);
  tails.clear(stream);
  const PagedKeys pages = pages_of(c, chunked);
  if (p.q_len > pages.few_rows) prefill(p, pages, c.dtype, stream);
  decode(c, decode_task(c, p, pages), chunked, c.lse_dtype, device, stream);
  o.finish();
}
template void paged_forward<float>(const AttentionCall&, const AttentionResults&);
template void paged_forward<double>(const AttentionCall&, const AttentionResults&);

}  // namespace attnjourney
