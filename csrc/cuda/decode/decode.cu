// CUDA entry of decode: few query rows over split keys (kernels/decode_*.cuh). Many go to decode_tiled.cu.
#include "cuda/attention/per_head.h"
#include "cuda/refusals.h"
#include "decode_split.h"
#include "mla_decode_cuda.h"

namespace attnjourney {
namespace {

CacheStrides strides_of(const Tensor& t) { return {stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)}; }

void describe_mask(DecodeTask& p, const DecodeCall& c, const Tensor& mask) {
  p.mask = mask.data_ptr();
  p.mask_kind = c.mask == MaskKind::boolean ? MaskElement::boolean
                : c.mask_fp32               ? MaskElement::fp32
                                            : MaskElement::same;
  p.mask_bytes = static_cast<int>(mask.element_size());
  p.mask_batch = c.mask_batch, p.mask_head = c.mask_head, p.mask_row = c.mask_row, p.mask_col = c.mask_col;
}

void describe(DecodeTask& p, const DecodeCall& c, const DecodeInputs& in) {
  p.key = in.key.data_ptr(), p.value = in.value.data_ptr();
  p.k = strides_of(in.key), p.v = strides_of(in.value);
  p.lengths = static_cast<const int64_t*>(in.lengths.data_ptr());
  p.longest = c.ring ? KeyRanges::unbounded : c.capacity;
  if (in.options.attn_mask && in.options.attn_mask->size(-1) != 1)
    p.longest = std::min(p.longest, in.options.attn_mask->size(-1));
  if (in.block_table) {
    p.table = static_cast<const int*>(in.block_table->data_ptr());
    p.blocks = static_cast<int>(in.key.size(0)), p.max_blocks = static_cast<int>(in.block_table->size(1));
    p.block_size = static_cast<int>(c.block_size);
  }
  p.capacity = static_cast<int>(c.capacity), p.ring = c.ring;
  p.batch = static_cast<int>(c.batch), p.kv_heads = static_cast<int>(c.kv_heads), p.group = static_cast<int>(c.group);
  p.q_len = static_cast<int>(c.q_len), p.rows = p.group * p.q_len;
  p.head_dim = static_cast<int>(c.head_dim), p.v_head_dim = static_cast<int>(c.v_head_dim);
  p.keys = c.keys(c.capacity).narrow();
  p.scaled_only = !c.modifier.on() && !in.options.alibi_slopes && c.mask == MaskKind::none;
  if (in.key_scale) {
    p.bytes = byte_kind(in.key);
    p.key_scale = static_cast<const float*>(in.key_scale->data_ptr());
    p.value_scale = static_cast<const float*>(in.value_scale->data_ptr());
    p.key_scale_outer = stride_of(*in.key_scale, 0), p.key_scale_head = stride_of(*in.key_scale, 1);
    p.value_scale_outer = stride_of(*in.value_scale, 0), p.value_scale_head = stride_of(*in.value_scale, 1);
  }
  if (in.options.attn_mask) describe_mask(p, c, *in.options.attn_mask);
  describe_scores(p, c.scale, c.modifier);
}

void decode_few(const DecodeCall& c, const DecodeInputs& in, const DecodeTask& cache, const Tensor& query,
                const Tensor& out, const Tensor& lse) {
  const CudaDecode& kernel = decode_kernel(query.scalar_type(), in.key_scale.has_value());
  decode_split(kernel, in_chunks(in.key) && in_chunks(in.value), c, in, cache, query, out, lse);
}

}  // namespace

const CudaDecode& decode_kernel(ScalarType query, bool bytes) {
  if (query == ScalarType::Double) return sm80_decode_fp64;
  if (query == ScalarType::Float) return bytes ? sm80_decode_bytes_fp32 : sm80_decode_fp32;
  if (query == ScalarType::BFloat16) return bytes ? sm80_decode_bytes_bf16 : sm80_decode_bf16;
  return bytes ? sm80_decode_bytes_fp16 : sm80_decode_fp16;
}

DecodeTask describe_cache(const DecodeCall& c, const DecodeInputs& in) {
  DecodeTask p{};
  describe(p, c, in);
  return p;
}

void decode_split(const CudaDecode& kernel, bool chunked, const DecodeCall& c, const DecodeInputs& in, DecodeTask p,
                  const Tensor& given, const Tensor& out, const Tensor& lse) {
  const Tensor query = chunked && !in_chunks(given) ? torch::stable::clone(aten::contiguous(given)) : given;
  const Device device = current_device(query);
  const cudaStream_t stream = current_stream(device.index);
  p.query = query.data_ptr(), p.out = out.data_ptr(), p.lse = lse.data_ptr();
  p.q_batch = stride_of(query, 0), p.q_head = stride_of(query, 1), p.q_row = stride_of(query, 2);
  OptionalTensor sinks, slopes;  // copies live as long as this
  const auto numbers = [&](const OptionalTensor& t, OptionalTensor& held, const void*& data, int64_t& batch_stride) {
    if (!t) return;
    std::vector<int64_t> sizes{c.q_heads};
    if (t->dim() == 2) sizes.insert(sizes.begin(), c.batch), batch_stride = c.q_heads;
    held = per_head(t, sizes, lse.scalar_type(), query);
    data = held->data_ptr();
  };
  numbers(in.options.sinks, sinks, p.sinks, p.sinks_batch);
  numbers(in.options.alibi_slopes, slopes, p.slopes, p.slopes_batch);

  const DecodeTiling tiling = kernel.tiling(p.head_dim, p.v_head_dim, p.rows, chunked);
  p.row_tiles = (p.rows + tiling.rows - 1) / tiling.rows;
  const int64_t units = c.batch * c.kv_heads * p.row_tiles;
  const int64_t keys = c.keys(std::min<int64_t>(c.capacity, p.longest)).most(c.q_len);  // of a sequence
  p.splits = tiling.shares_all ? decode_groups(c.batch, p.row_tiles, keys, tiling, device)
                               : decode_splits(units, keys, tiling, device);
  OptionalTensor parts, shares;  // outputs, references and sums of every split, or of two parts a group
  if (tiling.shares_all) {
    shares = aten::empty(query, {c.batch, 2}, ScalarType::Int);
    p.shares = static_cast<int*>(shares->data_ptr());
  }
  if (p.splits > 1) {
    const int64_t rows = (tiling.shares_all ? 2 * p.row_tiles : units) * p.splits * tiling.rows;
    parts = aten::empty(query, {rows * (2 + c.v_head_dim)}, lse.scalar_type());
    p.part_stats = parts->data_ptr();
    p.part_out = static_cast<char*>(p.part_stats) + rows * 2 * lse.element_size();
  }
  OptionalTensor zeros;
  if (last_blocks_join(units, p.rows, p.splits, c.v_head_dim, tiling))
    p.arrivals = stream_zeros(query, device.index, stream, kTileCounters, static_cast<int>(units), zeros);
  kernel.launch(p, chunked, stream);
}

void cuda_decode(const DecodeCall& c, const DecodeInputs& in, const Tensor& out, const Tensor& lse) {
  if (is_of_latents(c, in)) return cuda_decode_latents(c, in, out, lse);
  check_decode_served(c, in);
  if (c.batch * c.q_heads * c.q_len == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(in.query.get_device_index());
  const Tensor query = aten::rows_contiguous(in.query);
  const DecodeTask cache = describe_cache(c, in);
  const auto split = [&] {  // what this call's keys are, where its rows are many
    const int64_t keys = c.keys(std::min<int64_t>(c.capacity, cache.longest)).most(c.q_len);
    return query.element_size() == 2 && in_chunks(in.key) && in_chunks(in.value) &&
           many_rows_are_split(c.batch * c.kv_heads, c.group, c.q_len, keys, current_device(query));
  };
  const bool many = c.group * c.q_len > kFewRows && c.q_len > 16 && !is_masked_ring(c, in) && !split();
  (is_wide(c) || many ? cuda_decode_tiled : decode_few)(c, in, cache, query, out, lse);
}

}  // namespace attnjourney
