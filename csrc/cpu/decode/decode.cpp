// CPU entry of decode. Few query rows go through few_rows.cpp, many (a prompt, or a large piece of one) through
// decode_tiled.cpp.
#include "cache_walk.h"
#include "decode_cpu.h"
#include "few_rows.h"

namespace attnjourney {
namespace {

constexpr int64_t few_rows = 16;  // query rows of one sequence that count as few

void decode_few(const DecodeCall& c, const DecodeInputs& in, const Tensor& query, const Tensor& out,
                const Tensor& lse) {
  const CacheWalk walk(c, in);
  const int64_t* lengths = static_cast<const int64_t*>(in.lengths.const_data_ptr());
  const std::vector<double> sinks = per_head(in.options.sinks, c.batch, c.q_heads),
                            slopes = per_head(in.options.alibi_slopes, c.batch, c.q_heads);
  const char* const mask =
      in.options.attn_mask ? static_cast<const char*>(in.options.attn_mask->const_data_ptr()) : nullptr;
  const int64_t mask_item = mask ? item_size(in.options.attn_mask->scalar_type()) : 0;

  FewRows call{
      .dtype = query.scalar_type(), .cache_dtype = in.key.scalar_type(), .kv_heads = c.kv_heads, .group = c.group};
  call.one_by_one = c.block_size == 1;
  DecodeParams p;
  p.q_len = c.q_len, p.head_dim = c.head_dim, p.v_head_dim = c.v_head_dim;
  p.q_head = stride_of(query, 1), p.q_row = stride_of(query, 2), p.k_row = walk.key_row(), p.v_row = walk.value_row();
  p.out_head = c.q_len * c.v_head_dim, p.out_row = c.v_head_dim, p.lse_head = c.q_len;
  p.scale = c.scale;
  p.modifier = c.modifier, p.alibi = !slopes.empty();
  p.mask = c.mask, p.mask_fp32 = c.mask_fp32;
  p.mask_head = c.mask_head, p.mask_row = c.mask_row, p.mask_col = c.mask_col;
  for (int64_t b = 0; b < c.batch; b++) {
    p.keys = c.keys(lengths[b]);
    call.sequences.push_back(p);
  }
  const char* const q = static_cast<const char*>(query.const_data_ptr());
  char *const o = static_cast<char*>(out.mutable_data_ptr()), *const l = static_cast<char*>(lse.mutable_data_ptr());
  const int64_t item = item_size(query.scalar_type()), lse_item = item_size(lse.scalar_type());
  call.rows = [&](int64_t b, int64_t kv) {
    const int64_t bh = b * c.q_heads + kv * c.group;
    DecodeRows r;
    r.query = q + (b * stride_of(query, 0) + kv * c.group * stride_of(query, 1)) * item;
    r.out = o + bh * c.q_len * c.v_head_dim * item;
    r.lse = l + bh * c.q_len * lse_item;
    if (mask) r.mask = mask + (b * c.mask_batch + kv * c.group * c.mask_head) * mask_item;
    if (!sinks.empty()) r.sinks = sinks.data() + bh;
    if (!slopes.empty()) r.slopes = slopes.data() + bh;
    return r;
  };
  call.runs = [&](int64_t b, int64_t kv, int64_t from, int64_t to, std::vector<DecodeRun>& found) {
    walk.runs(b, kv, from, to, found);
  };
  run_few_rows(call, query);
}

}  // namespace

void cpu_decode(const DecodeCall& c, const DecodeInputs& in, const Tensor& out, const Tensor& lse) {
  check_decode_values(c, in);
  if (c.batch * c.q_heads * c.q_len == 0) return;
  const Tensor query = aten::rows_contiguous(in.query);
  (c.q_len <= few_rows ? decode_few : decode_tiled)(c, in, query, out, lse);
}

}  // namespace attnjourney
