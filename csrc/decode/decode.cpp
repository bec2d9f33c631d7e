#include "decode.h"

#include <algorithm>

#include "attention/attention.h"
#include "cache_checks.h"
#include "core/backend.h"

namespace attnjourney {
namespace {

// what changes the scores, and what hides keys besides the window
void check_scores(DecodeCall& c, const DecodeInputs& in) {
  const Tensor& q = in.query;
  const AttentionOptions& o = in.options;
  check_prefix_length(o.prefix_length);
  check_value(o.prefix_length == 0 || !in.ring, "prefix_length: expected 0 beside a ring, which forgets its first ",
              "keys, got ", o.prefix_length);
  c.prefix = o.prefix_length;
  c.modifier = check_score_options(o, c.batch, c.q_heads, q);
  if (!o.attn_mask) return;
  const Tensor& m = *o.attn_mask;
  check_value(m.dim() >= 1, "attn_mask: expected at least 1 dimension, got shape ", shape_text(m));
  check_mask_tensor(m, {c.batch, c.q_heads, c.q_len, m.size(-1)}, q);  // the last one: see check_mask_keys
  c.mask = m.scalar_type() == ScalarType::Bool ? MaskKind::boolean : MaskKind::floating;
  c.mask_fp32 = m.scalar_type() == ScalarType::Float && q.scalar_type() != ScalarType::Float;
  const auto stride = [&](int64_t from_end) { return stride_of(m, m.dim() - from_end); };
  c.mask_col = stride(1), c.mask_row = stride(2), c.mask_head = stride(3), c.mask_batch = stride(4);
}

}  // namespace

void check_decode_values(const DecodeCall& c, const DecodeInputs& in) {
  const int64_t* lengths = static_cast<const int64_t*>(in.lengths.const_data_ptr());
  int64_t longest = 0;
  for (int64_t b = 0; b < c.batch; b++) {
    longest = std::max(longest, lengths[b]);
    check_length("lengths", b, lengths[b], c.ring ? KeyRanges::unbounded : c.capacity, "the cache's capacity");
    if (in.block_table) check_blocks_of(*in.block_table, b, lengths[b], in.key);
  }
  const OptionalTensor& mask = in.options.attn_mask;
  if (!mask) return;
  const int64_t keys = mask->size(-1);
  check_value(keys == 1 || keys == longest || (!c.ring && keys == c.capacity),
              "attn_mask: expected a last dimension of 1 or of the longest length, ", longest,
              c.ring ? std::string() : text(", or of the capacity, ", c.capacity), ", got shape ", shape_text(*mask));
}

DecodeCall check_decode(const DecodeInputs& in) {
  const Tensor &q = in.query, &k = in.key, &v = in.value;
  const auto& [attn_mask, cu_seqlens_q, cu_seqlens_k, block_table, blocks, dropout_p, is_causal, scale, enable_gqa,
               causal_alignment, window, prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes,
               origin, dropout_seed] = in.options;
  DecodeCall c{};
  check_dim("query", q, 4);
  check_floating("query", q);
  c.batch = q.size(0), c.q_heads = q.size(1), c.q_len = q.size(2), c.head_dim = q.size(3);
  check_value(c.head_dim > 0, "query: expected a head_dim (last dimension) of at least 1, got shape ", shape_text(q));
  const bool paged = in.block_table.has_value();
  check_scale_pair(in.key_scale, in.value_scale);
  check_cache_dtype("key", k, "key_scale", in.key_scale, "query", q);
  check_cache_dtype("value", v, "value_scale", in.value_scale, "query", q);
  if (in.key_scale) check_same_dtype("value", v, "key", k);
  check_caches(k, v, paged ? -1 : c.batch, q, c.q_heads, c.head_dim);
  check_cache_scale("key_scale", in.key_scale, "key", k);
  check_cache_scale("value_scale", in.value_scale, "value", v);
  c.kv_heads = k.size(1), c.v_head_dim = v.size(3);
  c.group = c.kv_heads > 0 ? c.q_heads / c.kv_heads : 1;
  check_lengths_tensor("lengths", in.lengths, c.batch, "query", q);
  c.capacity = k.size(2);
  if (paged) {
    check_block_table(*in.block_table, c.batch, "query", q);
    c.block_size = k.size(2);
    check_block_size("key: expected a block size (dimension 2)", c.block_size, *in.block_table);
    c.capacity = c.block_size * in.block_table->size(1);
    check_value(!in.ring, "ring: expected False beside a block_table");
  }
  c.ring = in.ring;
  c.scale = check_scale(scale, c.head_dim);
  const auto [left, right] = window;
  check_value(left >= -1 && right >= -1, "window_size: expected two numbers of at least -1, got (", left, ", ", right,
              ")");
  c.left = window_bound(left);
  c.right = is_causal ? 0 : window_bound(right);
  if (in.ring) {  // older keys are gone
    check_value(c.left + c.q_len <= c.capacity, "window_size: expected left + query rows of at most the ring's ",
                c.capacity, " keys, got ", left < 0 ? "an unbounded left" : text(left, " + ", c.q_len));
  }
  (void)attn_mask, (void)prefix_length, (void)softcap, (void)sinks, (void)alibi_slopes;
  check_scores(c, in);
  // read_decode_options leaves or sets these
  (void)cu_seqlens_q, (void)cu_seqlens_k, (void)block_table, (void)blocks, (void)key_lengths, (void)query_lengths;
  (void)dropout_p, (void)dropout_seed, (void)origin, (void)enable_gqa, (void)causal_alignment;
  return c;
}

std::tuple<Tensor, Tensor> decode_with(DecodeFunction kernel, const DecodeInputs& in) {
  const DecodeCall c = check_decode(in);
  const ScalarType lse_dtype = in.query.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor out = aten::empty(in.query, {c.batch, c.q_heads, c.q_len, c.v_head_dim});
  const Tensor lse = aten::empty(in.query, {c.batch, c.q_heads, c.q_len}, lse_dtype);
  kernel(c, in, out, lse);
  return {out, lse};
}

std::tuple<Tensor, Tensor> decode(const Backend& backend, Arguments& arguments) {
  DecodeInputs in{.query = arguments.tensor(),
                  .key = arguments.tensor(),
                  .value = arguments.tensor(),
                  .lengths = arguments.tensor(),
                  .block_table = arguments.optional_tensor(),
                  .ring = arguments.flag(),
                  .key_scale = arguments.optional_tensor(),
                  .value_scale = arguments.optional_tensor()};
  read_decode_options(arguments, in.options);
  return decode_with(backend.decode.decode, in);
}

}  // namespace attnjourney
