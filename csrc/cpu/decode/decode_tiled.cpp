// Many query rows over a cache: a prompt, or a large piece of one. The tiled kernel of kernels/attention/forward.h,
// with each sequence's own key ranges.
#include <cstring>

#include "cache_walk.h"
#include "cpu/plan.h"
#include "cpu/threads.h"
#include "decode_cpu.h"

namespace attnjourney {
namespace {

// Whether the kernel reads the blocks of a paged cache in place.
bool in_pages(const DecodeCall& c, const DecodeInputs& in) { return c.block_size && !in.key_scale; }

// The visible keys of each (sequence, key/value head) in one piece: in place if the cache is dense, else copied, bytes
// in the dtype of the query. Of a paged cache in that dtype each head's first block.
struct Pieces {
  std::vector<const void*> key, value;
  std::vector<Tensor> copies;
  int64_t key_row, value_row;
};
Pieces in_one_piece(const DecodeCall& c, const DecodeInputs& in, const std::vector<KeyRange>& seen) {
  const CacheWalk walk(c, in);
  const ScalarType dtype = in.query.scalar_type(), cached = in.key.scalar_type();
  const int64_t item = item_size(dtype), kb = c.head_dim * item, vb = c.v_head_dim * item;
  const int64_t cached_item = item_size(cached);
  const bool bytes = in.key_scale.has_value(), pages = in_pages(c, in), copy = c.ring || bytes;
  const auto dequantize = bytes ? quantized_kernels(dtype, cached).dequantize : nullptr;
  const auto put = [&](char* to, const void* rows, int64_t j, int64_t row, int64_t dim, const float* scales) {
    const char* const from = static_cast<const char*>(rows) + j * row * cached_item;
    if (dequantize)
      dequantize(from, scales[j], dim, to);
    else
      std::memcpy(to, from, static_cast<size_t>(dim * item));
  };
  Pieces pieces;
  pieces.key_row = copy ? c.head_dim : walk.key_row();
  pieces.value_row = copy ? c.v_head_dim : walk.value_row();
  for (int64_t b = 0; b < c.batch; b++) {
    const KeyRange range = seen[static_cast<size_t>(b)];
    const int64_t n = std::max<int64_t>(0, range.end - range.begin);
    char *keys = nullptr, *values = nullptr;
    if (copy) {
      pieces.copies.push_back(aten::empty(in.query, {c.kv_heads * n * (c.head_dim + c.v_head_dim)}));
      keys = static_cast<char*>(pieces.copies.back().mutable_data_ptr());
      values = keys + c.kv_heads * n * kb;
    }
    std::vector<DecodeRun> runs;
    for (int64_t h = 0; h < c.kv_heads; h++) {
      if (pages) {
        pieces.key.push_back(walk.key(0, h));
        pieces.value.push_back(walk.value(0, h));
        continue;
      }
      runs.clear();
      walk.runs(b, h, range.begin, range.end, runs);
      if (!copy) {
        pieces.key.push_back(runs.empty() ? nullptr : runs.front().key);
        pieces.value.push_back(runs.empty() ? nullptr : runs.front().value);
        continue;
      }
      pieces.key.push_back(keys + h * n * kb);
      pieces.value.push_back(values + h * n * vb);
      for (const DecodeRun& run : runs)
        for (int64_t j = 0; j < run.count; j++) {
          const int64_t to = h * n + run.first - range.begin + j;
          put(keys + to * kb, run.key, j, walk.key_row(), c.head_dim, run.key_scale);
          put(values + to * vb, run.value, j, walk.value_row(), c.v_head_dim, run.value_scale);
        }
    }
  }
  return pieces;
}

}  // namespace

void decode_tiled(const DecodeCall& c, const DecodeInputs& in, const Tensor& query, const Tensor& out,
                  const Tensor& lse) {
  const int64_t* lengths = static_cast<const int64_t*>(in.lengths.const_data_ptr());
  AttentionCall call{.args = {.query = query, .key = in.key, .value = in.value, .options = {}}};
  call.batch = c.batch, call.q_heads = c.q_heads, call.kv_heads = c.kv_heads;
  call.dtype = query.scalar_type(), call.lse_dtype = lse.scalar_type();
  AttentionParams& shared = call.params;
  shared.q_len = c.q_len, shared.head_dim = c.head_dim, shared.v_head_dim = c.v_head_dim;
  shared.group = c.group, shared.scale = c.scale;
  shared.modifier = c.modifier, shared.alibi = in.options.alibi_slopes.has_value();
  shared.mask = c.mask, shared.mask_fp32 = c.mask_fp32, shared.mask_row = c.mask_row, shared.mask_col = c.mask_col;
  shared.q_row = stride_of(query, 2), shared.out_row = c.v_head_dim;

  const bool pages = in_pages(c, in);
  std::vector<KeyRange> seen;
  for (int64_t b = 0; b < c.batch; b++) {
    seen.push_back(c.keys(lengths[b]).any(0, c.q_len - 1).hull());
    if (pages) seen.back().begin = 0;
    shared.kv_len = std::max(shared.kv_len, seen.back().end - seen.back().begin);
  }
  const Pieces pieces = in_one_piece(c, in, seen);
  shared.k_row = pieces.key_row, shared.v_row = pieces.value_row;
  if (pages) shared.page_size = c.block_size;
  shared.k_page = stride_of(in.key, 0), shared.v_page = stride_of(in.value, 0);
  std::vector<AttentionParams> params(static_cast<size_t>(c.batch), shared);
  shared.keys.key_length = shared.kv_len;
  int64_t space = 0;
  const Sequences uniform(call);
  const ForwardPlan plan = plan_forward(call, uniform);
  for (int64_t b = 0; b < c.batch; b++) {  // counted from the first key seen
    AttentionParams& p = params[static_cast<size_t>(b)];
    const KeyRange range = seen[static_cast<size_t>(b)];
    p.kv_len = std::max<int64_t>(0, range.end - range.begin);
    p.keys = c.keys(lengths[b]);
    p.keys.offset -= range.begin;
    p.keys.set_length(p.kv_len);
    space = std::max(space, plan.kernel->forward_space(p, std::min(plan.rows, c.q_len)));
  }
  const int64_t item = item_size(query.scalar_type()), lse_item = item_size(lse.scalar_type());
  const char* const q = static_cast<const char*>(query.const_data_ptr());
  char *const o = static_cast<char*>(out.mutable_data_ptr()), *const l = static_cast<char*>(lse.mutable_data_ptr());
  const Tensor stats = aten::empty(lse, {c.batch, c.q_heads, c.q_len, 2});  // the kernel's, and nobody reads them here
  char* const s = static_cast<char*>(stats.mutable_data_ptr());
  const std::vector<double> sinks = per_head(in.options.sinks, c.batch, c.q_heads),
                            slopes = per_head(in.options.alibi_slopes, c.batch, c.q_heads);
  const char* const mask =
      in.options.attn_mask ? static_cast<const char*>(in.options.attn_mask->const_data_ptr()) : nullptr;
  const int64_t mask_item = mask ? item_size(in.options.attn_mask->scalar_type()) : 0;
  run_queue(plan.items, plan.threads, space, [&](int64_t i, void* scratch) {
    const auto [b, head, first, rows] = plan.at(i, uniform);
    if (!rows) return;
    const int64_t bh = b * c.q_heads + head;
    HeadPointers h;
    h.index = static_cast<uint32_t>(bh);
    h.query = q + (b * stride_of(query, 0) + head * stride_of(query, 1)) * item;
    h.key = pieces.key[static_cast<size_t>(b * c.kv_heads + head / c.group)];
    h.value = pieces.value[static_cast<size_t>(b * c.kv_heads + head / c.group)];
    if (pages) h.pages = static_cast<const int32_t*>(in.block_table->const_data_ptr()) + b * in.block_table->size(1);
    const int64_t first_key = seen[static_cast<size_t>(b)].begin;
    if (mask) h.mask = mask + (b * c.mask_batch + head * c.mask_head + first_key * c.mask_col) * mask_item;
    if (!sinks.empty()) h.sink = sinks[static_cast<size_t>(bh)];
    if (!slopes.empty()) h.slope = slopes[static_cast<size_t>(bh)];
    h.out = o + bh * c.q_len * c.v_head_dim * item;
    h.lse = l + bh * c.q_len * lse_item;
    h.stats = s + bh * c.q_len * 2 * lse_item;
    plan.kernel->forward(params[static_cast<size_t>(b)], h, first, rows, scratch);
  });
}

}  // namespace attnjourney
