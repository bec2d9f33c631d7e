#include "fp8.h"

#include "core/backend.h"

namespace attnjourney {
namespace {

// the scales of the rows of t, (batch, heads, rows, dim)
void check_scales(const char* name, const Tensor& scales, const char* of, const Tensor& t, HeadMap& map, int64_t heads,
                  int64_t& block) {
  check_dtype(dtype_of(scales) == ScalarType::Float, name, scales, "dtype torch.float32");
  check_same_device(name, scales, of, t);
  const int64_t want[] = {t.size(0), t.size(1), (t.size(2) + fp8_scale_rows - 1) / fp8_scale_rows};
  bool fits = scales.dim() == 3;
  for (int d = 0; fits && d < 3; d++) fits = scales.size(d) == want[d] || scales.size(d) == 1;
  check_tensor(fits, name, scales, ": expected a number for each batch item, head and ", fp8_scale_rows, " rows of ",
               of, ", a shape that broadcasts to (", want[0], ", ", want[1], ", ", want[2], "), got ",
               shape_text(scales));
  map.head_div = t.size(1) > 0 ? std::max<int64_t>(1, heads / t.size(1)) : 1;
  map.head_stride = stride_of(scales, 1);
  map.batch_stride[0] = stride_of(scales, 0);
  block = stride_of(scales, 2);
}

}  // namespace

void check_fp8_scales(AttentionCall& c) {
  const auto& [query, key, value, options, fp8] = c.args;
  (void)options;
  AttentionParams& p = c.params;
  check_scales("query_scale", fp8->query, "query", query, c.query_scale_map, c.q_heads, p.query_scale_block);
  check_scales("key_scale", fp8->key, "key", key, c.key_scale_map, c.q_heads, p.key_scale_block);
  check_scales("value_scale", fp8->value, "value", value, c.value_scale_map, c.q_heads, p.value_scale_block);
}

std::tuple<Tensor, Tensor> attention_fp8(const Backend& backend, Arguments& in) {
  AttentionArgs args{.query = in.tensor(), .key = in.tensor(), .value = in.tensor(), .options = {}};
  args.fp8 = Fp8Scales{.query = in.tensor(), .key = in.tensor(), .value = in.tensor(), .out_dtype = ScalarType::Float};
  read_fp8_options(in, args.options);
  const int64_t out_dtype = in.integer();
  check_value(out_dtype >= 0 && out_dtype <= 2, "out_dtype: expected 0 (bfloat16), 1 (float16) or 2 (float32), got ",
              out_dtype);
  constexpr ScalarType dtypes[] = {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float};
  args.fp8->out_dtype = dtypes[out_dtype];
  for (const auto& [name, t] : {std::pair{"query", args.query}, {"key", args.key}, {"value", args.value}})
    check_dim(name, t, 4);
  if (const OptionalTensor& sinks = args.options.sinks)  // not in query's dtype, as elsewhere
    check_dtype(dtype_of(*sinks) == ScalarType::Float, "sinks", *sinks, "dtype torch.float32");
  AttentionCall c = check_attention(std::move(args));
  const AttentionParams& p = c.params;
  const Tensor& like = c.args.fp8->query;
  const int64_t batch = c.batch_size[0];
  const AttentionResults results{.out = aten::empty(like, {batch, c.q_heads, p.q_len, p.v_head_dim}, c.dtype),
                                 .lse = aten::empty(like, {batch, c.q_heads, p.q_len}, c.lse_dtype),
                                 .stats = aten::empty(like, {batch, c.q_heads, p.q_len, 2}, c.lse_dtype)};
  backend.attention.forward(c, results);
  return {results.out, results.lse};
}

}  // namespace attnjourney
