// Attention's forward for few query rows: its calls as those of decoding.
#include "few_rows.h"

#include <algorithm>

#include "cpu/plan.h"

namespace attnjourney {

bool takes_few_rows(const AttentionCall& c, const Sequences& sequences) {
  const DecodeKernels& kernel = decode_kernels(c.dtype);
  const int64_t rows = sequences.largest().q_len;
  return rows > 0 && rows <= kernel.few_rows && c.args.options.dropout_p == 0 && c.params.mask != MaskKind::blocks;
}

FewRows few_rows_of(const AttentionCall& c, const Sequences& sequences) {
  const AttentionParams& shared = c.params;
  FewRows call{.dtype = c.dtype, .cache_dtype = c.dtype, .kv_heads = c.kv_heads, .group = shared.group};
  DecodeParams p;
  p.head_dim = shared.head_dim, p.v_head_dim = shared.v_head_dim;
  p.q_head = c.query_map.head_stride, p.q_row = shared.q_row, p.k_row = shared.k_row, p.v_row = shared.v_row;
  p.out_row = shared.out_row, p.lse_head = shared.q_len;
  p.scale = shared.scale, p.modifier = shared.modifier, p.alibi = shared.alibi;
  p.mask = shared.mask, p.mask_fp32 = shared.mask_fp32;
  p.mask_head = c.mask_map.head_stride, p.mask_row = shared.mask_row, p.mask_col = shared.mask_col;
  for (int64_t b = 0; b < c.batch; b++) {
    const AttentionParams own = sequences.params(b);
    p.q_len = own.q_len, p.keys = own.keys;
    call.sequences.push_back(p);
  }
  const AttentionParams largest = sequences.largest();
  call.again_space = kernels_for(c).forward_space(largest, largest.q_len);
  return call;
}

void forward_few_rows(const AttentionCall& c, const Sequences& sequences, const HeadInputs& heads) {
  const AttentionParams& shared = c.params;
  const AttentionKernels& tiled = kernels_for(c);
  FewRows call = few_rows_of(c, sequences);
  for (DecodeParams& p : call.sequences) p.out_head = heads.out().map().head_stride;
  const int64_t item = item_size(c.dtype);
  call.rows = [&](int64_t b, int64_t kv) {
    const HeadPointers first = heads.at(b, kv * shared.group);
    return DecodeRows{.query = first.query,
                      .out = first.out,
                      .lse = first.lse,
                      .stats = first.stats,
                      .mask = first.mask,
                      .sinks = heads.sinks(b, kv * shared.group),
                      .slopes = heads.slopes(b, kv * shared.group)};
  };
  call.runs = [&](int64_t b, int64_t kv, int64_t from, int64_t to, std::vector<DecodeRun>& found) {
    const HeadPointers first = heads.at(b, kv * shared.group);
    found.push_back({static_cast<const char*>(first.key) + from * shared.k_row * item,
                     static_cast<const char*>(first.value) + from * shared.v_row * item, from, to - from});
  };
  call.again = [&](int64_t b, int64_t kv, const DecodeRows& r, void* scratch) {
    const AttentionParams own = sequences.params(b);
    for (int64_t i = r.first; i < r.first + r.count; i++)
      if (i == r.first || i % own.q_len == 0) {
        const int64_t row = i % own.q_len, count = std::min(own.q_len - row, r.first + r.count - i);
        tiled.forward(own, heads.at(b, kv * shared.group + i / own.q_len), row, count, scratch);
      }
  };
  run_few_rows(call, c.args.query);
}

}  // namespace attnjourney
