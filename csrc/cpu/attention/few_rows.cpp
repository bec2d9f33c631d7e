// Attention's forward for few query rows: its calls as those of decoding.
#include "few_rows.h"

#include <algorithm>
#include <numeric>

#include "cpu/plan.h"

namespace attnjourney {

std::vector<int64_t> few_row_items(const AttentionCall& c, const Sequences& sequences) {
  const int64_t most = decode_kernels(c.dtype).few_rows;
  std::vector<int64_t> items;
  if (c.args.options.dropout_p != 0 || c.params.mask == MaskKind::blocks || c.args.fp8) return items;
  if (sequences.uniform()) {
    if (c.params.q_len == 0 || c.params.q_len > most) return items;
    items.resize(static_cast<size_t>(c.batch));
    std::iota(items.begin(), items.end(), 0);
    return items;
  }
  bool any = false;  // items without a row go along
  for (int64_t b = 0; b < c.batch; b++)
    if (const int64_t rows = sequences.q_len(b); rows <= most) items.push_back(b), any |= rows > 0;
  if (!any) items.clear();
  return items;
}

FewRows few_rows_of(const AttentionCall& c, const Sequences& sequences, const std::vector<int64_t>& items) {
  const AttentionParams& shared = c.params;
  FewRows call{.dtype = c.dtype, .cache_dtype = c.dtype, .kv_heads = c.kv_heads, .group = shared.group};
  DecodeParams p;
  p.head_dim = shared.head_dim, p.v_head_dim = shared.v_head_dim;
  p.q_head = c.query_map.head_stride, p.q_row = shared.q_row, p.k_row = shared.k_row, p.v_row = shared.v_row;
  p.out_row = shared.out_row, p.lse_head = shared.q_len;
  p.scale = shared.scale, p.modifier = shared.modifier, p.alibi = shared.alibi;
  p.mask = shared.mask, p.mask_fp32 = shared.mask_fp32;
  p.mask_head = c.mask_map.head_stride, p.mask_row = shared.mask_row, p.mask_col = shared.mask_col;
  for (const int64_t b : items) {
    const AttentionParams own = sequences.params(b);
    p.q_len = own.q_len, p.keys = own.keys;
    call.sequences.push_back(p);
    call.again_space = std::max(call.again_space, kernels_for(c).forward_space(own, own.q_len));
  }
  return call;
}

void forward_few_rows(const AttentionCall& c, const Sequences& sequences, const std::vector<int64_t>& items,
                      const HeadInputs& heads) {
  const AttentionParams& shared = c.params;
  const AttentionKernels& tiled = kernels_for(c);
  FewRows call = few_rows_of(c, sequences, items);
  for (DecodeParams& p : call.sequences) p.out_head = heads.out().map().head_stride;
  const int64_t item = item_size(c.dtype);
  call.rows = [&](int64_t i, int64_t kv) {
    const int64_t b = items[static_cast<size_t>(i)];
    const HeadPointers first = heads.at(b, kv * shared.group);
    return DecodeRows{.query = first.query,
                      .out = first.out,
                      .lse = first.lse,
                      .stats = first.stats,
                      .mask = first.mask,
                      .sinks = heads.sinks(b, kv * shared.group),
                      .slopes = heads.slopes(b, kv * shared.group)};
  };
  call.runs = [&](int64_t i, int64_t kv, int64_t from, int64_t to, std::vector<DecodeRun>& found) {
    const HeadPointers first = heads.at(items[static_cast<size_t>(i)], kv * shared.group);
    const char *const key = static_cast<const char*>(first.key), *const value = static_cast<const char*>(first.value);
    while (from < to) {
      const int64_t page = first.pages ? from / shared.page_size : 0, slot = from - page * shared.page_size;
      const int64_t outer = first.pages ? first.pages[page] : 0;
      const int64_t count = first.pages ? std::min(to - from, shared.page_size - slot) : to - from;
      found.push_back({key + (outer * shared.k_page + slot * shared.k_row) * item,
                       value + (outer * shared.v_page + slot * shared.v_row) * item, from, count});
      from += count;
    }
  };
  call.again = [&](int64_t i, int64_t kv, const DecodeRows& rows, void* scratch) {
    const int64_t b = items[static_cast<size_t>(i)];
    const AttentionParams own = sequences.params(b);
    const int64_t end = rows.first + rows.count;
    for (int64_t r = rows.first; r < end; r++)
      if (r == rows.first || r % own.q_len == 0) {
        const int64_t row = r % own.q_len, count = std::min(own.q_len - row, end - r);
        tiled.forward(own, heads.at(b, kv * shared.group + r / own.q_len), row, count, scratch);
      }
  };
  run_few_rows(call, c.args.query);
}

}  // namespace attnjourney
