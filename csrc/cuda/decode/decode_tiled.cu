// Many query rows over a cache, a prompt or a large piece of one, or heads wider than 256: through attention's own
// kernels. A dense cache is read where it lies; keys of blocks, of a ring or in bytes are first brought into one piece
// in the dtype of the query, some sequences at a time.
#include "cuda/attention/attention_cuda.h"
#include "cuda/cache/cache_cuda.h"
#include "decode_cuda.h"

namespace attnjourney {
namespace {

constexpr int64_t piece_bytes = int64_t{256} << 20;  // or one sequence's keys and values

AttentionOptions options_of(const DecodeCall& c, const DecodeInputs& in) {
  AttentionOptions o = in.options;
  o.scale = c.scale;
  o.key_lengths = in.lengths;
  return o;
}

void forward(const Tensor& query, const Tensor& key, const Tensor& value, AttentionOptions options, const Tensor& out,
             const Tensor& lse) {
  AttentionCall call = check_attention({.query = query, .key = key, .value = value, .options = std::move(options)});
  const Tensor stats = aten::empty(lse, {lse.numel(), 2}, lse.scalar_type());  // written, read by no one
  cuda_attention_forward(call, {.out = out, .lse = lse, .stats = stats});
}

// items [first, first + n) of a dimension, counted from the end; left alone where it broadcasts or is not there
OptionalTensor cut(const OptionalTensor& t, int64_t from_end, int64_t first, int64_t n) {
  if (!t || t->dim() < from_end || t->size(t->dim() - from_end) == 1) return t;
  return torch::stable::narrow(const_cast<Tensor&>(*t), t->dim() - from_end, first, n);
}
Tensor part(const Tensor& t, int64_t first, int64_t n) { return *cut(t, t.dim(), first, n); }

void in_pieces(const DecodeCall& c, const DecodeInputs& in, const Tensor& query, const DecodeTask& cache, int64_t keys,
               const Tensor& out, const Tensor& lse) {
  const int64_t numbers_each = c.kv_heads * keys,
                bytes = numbers_each * (c.head_dim + c.v_head_dim) * query.element_size();
  const int64_t most = std::clamp<int64_t>(piece_bytes / std::max<int64_t>(1, bytes), 1, c.batch);
  GatherTask g{};
  int unit = 0;
  g.cache = cache, g.heads = static_cast<int>(c.kv_heads);
  const Tensor key = aten::empty(query, {most, c.kv_heads, keys, c.head_dim});
  const Tensor value = aten::empty(query, {most, c.kv_heads, keys, c.v_head_dim});
  const Tensor held = aten::empty(in.lengths, {most});
  g.from = cache_tensors(in.key, in.value, {&key, &value}, unit);
  g.to[0] = rows_of(key), g.to[1] = rows_of(value), g.held = numbers(held);
  if (in.key_scale) {
    g.from.units[0] = static_cast<int>(c.head_dim), g.from.units[1] = static_cast<int>(c.v_head_dim);
    g.bytes = byte_kind(in.key), g.scales[0] = rows_of(*in.key_scale), g.scales[1] = rows_of(*in.value_scale);
  }
  g.parts = append_parts(numbers_each * std::max(g.from.units[0], g.from.units[1]));
  const cudaStream_t stream = current_stream(query.get_device_index());
  for (int64_t first = 0; first < c.batch; first += most) {
    const int64_t n = std::min(most, c.batch - first);
    g.first_sequence = static_cast<int>(first);
    if (in.key_scale)
      launch_cache_expand(g, static_cast<int>(n), number_of(query.scalar_type()), stream);
    else
      launch_cache_gather(g, static_cast<int>(n), unit, stream);
    AttentionOptions o = options_of(c, in);
    o.key_lengths = part(held, 0, n);
    o.attn_mask = cut(in.options.attn_mask, 4, first, n);
    o.sinks = cut(in.options.sinks, 2, first, n), o.alibi_slopes = cut(in.options.alibi_slopes, 2, first, n);
    forward(part(query, first, n), part(key, 0, n), part(value, 0, n), std::move(o), part(out, first, n),
            part(lse, first, n));
  }
}

}  // namespace

void cuda_decode_tiled(const DecodeCall& c, const DecodeInputs& in, const DecodeTask& cache, const Tensor& query,
                       const Tensor& out, const Tensor& lse) {
  int64_t keys = c.capacity;  // a mask's columns, where it has fewer
  if (in.options.attn_mask && in.options.attn_mask->size(-1) != 1)
    keys = std::min(keys, in.options.attn_mask->size(-1));
  if (c.ring || c.block_size || in.key_scale) return in_pieces(c, in, query, cache, keys, out, lse);
  Tensor key = in.key, value = in.value;
  forward(query, torch::stable::narrow(key, 2, 0, keys), torch::stable::narrow(value, 2, 0, keys), options_of(c, in),
          out, lse);
}

}  // namespace attnjourney
