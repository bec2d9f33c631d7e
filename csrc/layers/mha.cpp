#include "mha.h"

#include <algorithm>
#include <vector>

#include "core/backend.h"
#include "layers.h"
#include "mha_mask.h"

namespace attnjourney {
namespace {

// Some of the projections query, key, value (0, 1, 2): those that read the same input. They lie side by side in the
// rows of one block, so that forward, input gradient and weight gradient are one product each.
struct Block {
  Tensor input;  // (batch * seq, embed)
  int64_t seq;
  int64_t first, count;  // projections first .. first + count - 1
  int64_t begin;         // where the block starts in the buffer of all projections
};

struct MhaCall {
  int64_t batch, q_len, kv_len, embed, heads, head_dim;
  std::vector<Block> blocks;
  int64_t buffer_size = 0;  // (q_len + 2 * kv_len) * batch * embed

  // (batch * seq, count * embed) in a buffer of all projections, or of their gradients
  Tensor rows(const Tensor& buffer, const Block& b) const {
    return aten::strided_view(buffer, {batch * b.seq, b.count * embed}, {b.count * embed, 1}, b.begin);
  }
  // projection 0, 1 or 2 as (batch, heads, seq, head_dim)
  Tensor split(const Tensor& buffer, int64_t projection) const {
    const Block* b = &blocks[0];
    while (projection >= b->first + b->count) b++;
    return layer::split_heads(rows(buffer, *b), batch, b->seq, heads, head_dim, (projection - b->first) * embed);
  }
  // (batch, q_len, embed) -> (batch, heads, q_len, head_dim)
  Tensor split_output(const Tensor& rows) const { return layer::split_heads(rows, batch, q_len, heads, head_dim); }
};

void check_key_value(const char* name, const Tensor& t, int64_t seq, const Tensor& query) {
  layer::check_sequence(name, t);
  check_same_dtype(name, t, "query", query);
  check_same_device(name, t, "query", query);
  check_value(t.size(0) == query.size(0) && t.size(1) == seq && t.size(2) == query.size(2), name, ": expected shape (",
              query.size(0), ", ", seq, ", ", query.size(2), ") beside query's ", shape_text(query), ", got ",
              shape_text(t));
}

MhaCall check(const Tensor& query, const OptionalTensor& key, const OptionalTensor& value, int64_t num_heads,
              const Tensor& in_proj_weight, const Tensor& out_proj_weight, double dropout_p) {
  layer::check_sequence("query", query);
  MhaCall c;
  c.batch = query.size(0), c.q_len = query.size(1), c.embed = query.size(2), c.heads = num_heads;
  c.kv_len = key ? key->dim() == 3 ? key->size(1) : 0 : c.q_len;
  c.head_dim = layer::check_heads("num_heads", num_heads, "query's last dimension", c.embed);
  if (key) check_key_value("key", *key, c.kv_len, query);
  if (value) check_key_value("value", *value, c.kv_len, query);
  layer::check_weight("in_proj_weight", in_proj_weight, 3 * c.embed, c.embed, "query", query);
  layer::check_weight("out_proj_weight", out_proj_weight, c.embed, c.embed, "query", query);
  check_dropout(dropout_p);

  const auto add = [&](const Tensor& input, int64_t seq, int64_t first, int64_t count) {
    c.blocks.push_back({layer::rows(input), seq, first, count, c.buffer_size});
    c.buffer_size += c.batch * seq * count * c.embed;
  };
  const int64_t with_query = key ? 1 : value ? 2 : 3;  // projections of query
  add(query, c.q_len, 0, with_query);
  if (key) add(*key, c.kv_len, 1, value ? 1 : 2);
  if (value) add(*value, c.kv_len, 2, 1);
  return c;
}

MhaMasks masks_of(const MhaCall& c, const Tensor& query, OptionalTensor attn_mask, OptionalTensor key_padding_mask) {
  const MhaMasks masks{.attn = std::move(attn_mask),
                       .padding = std::move(key_padding_mask),
                       .batch = c.batch,
                       .heads = c.heads,
                       .q_len = c.q_len,
                       .kv_len = c.kv_len,
                       .sum_dtype = layer::lse_dtype(query)};
  masks.check(query);
  return masks;
}

AttentionArgs attention_args(const MhaCall& c, const Tensor& projected, const MhaMasks& masks, bool is_causal,
                             double dropout_p, const OptionalTensor& dropout_seed) {
  AttentionArgs args{
      .query = c.split(projected, 0), .key = c.split(projected, 1), .value = c.split(projected, 2), .options = {}};
  args.options.attn_mask = masks.combined();
  args.options.is_causal = is_causal;
  args.options.dropout_p = dropout_p;
  args.options.dropout_seed = dropout_seed;
  return args;
}

}  // namespace

std::vector<Tensor> mha_forward(const Backend& backend, Arguments& in) {
  const Tensor query = in.tensor();
  const OptionalTensor key = in.optional_tensor(), value = in.optional_tensor();
  const int64_t num_heads = in.integer();
  const Tensor in_proj_weight = in.tensor();
  const OptionalTensor in_proj_bias = in.optional_tensor();
  const Tensor out_proj_weight = in.tensor();
  const OptionalTensor out_proj_bias = in.optional_tensor();
  const OptionalTensor attn_mask = in.optional_tensor(), key_padding_mask = in.optional_tensor();
  const bool is_causal = in.flag();
  const double dropout_p = in.number();
  const OptionalTensor dropout_seed = in.optional_tensor();

  const MhaCall c = check(query, key, value, num_heads, in_proj_weight, out_proj_weight, dropout_p);
  layer::check_bias("in_proj_bias", in_proj_bias, 3 * c.embed, "query", query);
  layer::check_bias("out_proj_bias", out_proj_bias, c.embed, "query", query);
  const MhaMasks masks = masks_of(c, query, attn_mask, key_padding_mask);

  const Tensor projected = aten::empty(query, {c.buffer_size});
  for (const Block& b : c.blocks) {
    const int64_t first = b.first * c.embed, count = b.count * c.embed;
    layer::linear_into(c.rows(projected, b), b.input, layer::slice(in_proj_weight, first, count),
                       layer::slice(in_proj_bias, first, count));
  }
  const Tensor attn = layer::empty_rows(query, c.batch * c.q_len, c.embed);
  const Tensor lse = aten::empty(query, {c.batch, c.heads, c.q_len}, layer::lse_dtype(query)),
               stats = aten::empty(query, {c.batch, c.heads, c.q_len, 2}, layer::lse_dtype(query));
  AttentionCall call = check_attention(attention_args(c, projected, masks, is_causal, dropout_p, dropout_seed));
  backend.attention.forward(call, {.out = c.split_output(attn), .lse = lse, .stats = stats});
  const Tensor out = layer::linear(attn, out_proj_weight, out_proj_bias);
  return {layer::sequence(out, c.batch, c.q_len), layer::sequence(attn, c.batch, c.q_len), lse, stats, projected};
}

std::vector<Tensor> mha_backward(const Backend& backend, Arguments& in) {
  const Tensor grad_out = in.tensor(), query = in.tensor();
  const OptionalTensor key = in.optional_tensor(), value = in.optional_tensor();
  const int64_t num_heads = in.integer();
  const Tensor in_proj_weight = in.tensor(), out_proj_weight = in.tensor();
  const OptionalTensor attn_mask = in.optional_tensor(), key_padding_mask = in.optional_tensor();
  const Tensor attn = in.tensor(), lse = in.tensor(), stats = in.tensor(), projected = in.tensor();
  const bool is_causal = in.flag();
  const double dropout_p = in.number();
  const OptionalTensor dropout_seed = in.optional_tensor();
  const int64_t need = in.integer();

  const MhaCall c = check(query, key, value, num_heads, in_proj_weight, out_proj_weight, dropout_p);
  const MhaMasks masks = masks_of(c, query, attn_mask, key_padding_mask);
  layer::check_saved("grad_out", grad_out, {c.batch, c.q_len, c.embed}, query);
  layer::check_saved("attn", attn, {c.batch, c.q_len, c.embed}, query);
  layer::check_saved("lse", lse, {c.batch, c.heads, c.q_len}, query, layer::lse_dtype(query));
  layer::check_saved("stats", stats, {c.batch, c.heads, c.q_len, 2}, query, layer::lse_dtype(query));
  layer::check_saved("projected", projected, {c.buffer_size}, query);
  enum { QUERY, KEY, VALUE, IN_WEIGHT, IN_BIAS, OUT_WEIGHT, OUT_BIAS, ATTN_MASK, PADDING, COUNT };
  const auto needs = [&](int64_t i) { return (need >> i & 1) != 0; };
  OptionalTensor grads[COUNT];

  const Tensor grad_rows = layer::rows(grad_out), attn_rows = layer::rows(attn);
  if (needs(OUT_WEIGHT)) grads[OUT_WEIGHT] = layer::weight_grad(grad_rows, attn_rows);
  if (needs(OUT_BIAS)) grads[OUT_BIAS] = layer::bias_grad(grad_rows);

  // gradients of the projections, each block only if something reads it
  const auto block_needed = [&](const Block& b) { return needs(b.first) || needs(IN_WEIGHT) || needs(IN_BIAS); };
  const bool any_block = std::any_of(c.blocks.begin(), c.blocks.end(), block_needed);
  const bool need_attn_mask = needs(ATTN_MASK) && MhaMasks::is_floating(masks.attn);
  const bool need_padding = needs(PADDING) && MhaMasks::is_floating(masks.padding);
  const Tensor grad_buffer = aten::empty(query, {any_block ? c.buffer_size : 0});
  if (any_block || need_attn_mask || need_padding) {
    AttentionGradients gradients;
    OptionalTensor* const parts[] = {&gradients.query, &gradients.key, &gradients.value};
    for (const Block& b : c.blocks)
      for (int64_t p = b.first; block_needed(b) && p < b.first + b.count; p++) *parts[p] = c.split(grad_buffer, p);
    if (need_attn_mask || need_padding) gradients.attn_mask = masks.empty_grad(need_attn_mask, need_padding);
    AttentionCall call =
        check_attention(attention_args(c, aten::contiguous(projected), masks, is_causal, dropout_p, dropout_seed));
    backend.attention.backward(call,
                               {.grad_out = c.split_output(layer::input_grad(grad_rows, out_proj_weight)),
                                .grad_lse = std::nullopt,
                                .out = c.split_output(attn_rows),
                                .lse = aten::contiguous(lse),
                                .stats = aten::contiguous(stats)},
                               gradients);
    if (need_attn_mask) grads[ATTN_MASK] = masks.attn_grad(*gradients.attn_mask);
    if (need_padding) grads[PADDING] = masks.padding_grad(*gradients.attn_mask);
  }
  if (needs(IN_WEIGHT)) grads[IN_WEIGHT] = layer::empty_rows(query, 3 * c.embed, c.embed);
  if (needs(IN_BIAS)) grads[IN_BIAS] = aten::empty(query, {3 * c.embed});
  for (const Block& b : c.blocks) {
    if (!block_needed(b)) continue;
    const int64_t first = b.first * c.embed, count = b.count * c.embed;
    const Tensor grad = c.rows(grad_buffer, b);
    if (needs(b.first))
      grads[b.first] =
          layer::sequence(layer::input_grad(grad, layer::slice(in_proj_weight, first, count)), c.batch, b.seq);
    if (needs(IN_WEIGHT)) layer::weight_grad_into(layer::slice(*grads[IN_WEIGHT], first, count), grad, b.input);
    if (needs(IN_BIAS)) layer::bias_grad_into(layer::slice(*grads[IN_BIAS], first, count), grad);
  }
  const auto grad = [&](int i) { return layer::or_none(grads[i], query); };
  return {grad(QUERY),      grad(KEY),      grad(VALUE),     grad(IN_WEIGHT), grad(IN_BIAS),
          grad(OUT_WEIGHT), grad(OUT_BIAS), grad(ATTN_MASK), grad(PADDING)};
}

}  // namespace attnjourney
