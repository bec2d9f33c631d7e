#include "tangents.h"

namespace attnjourney {

Tangents::Tangents(const AttentionCall& c, const AttentionTangents& t)
    : call_(c),
      query_(rows(t.query)),
      key_(rows(t.key)),
      value_(rows(t.value)),
      grad_out_(rows(t.grad_out)),
      out_(rows(t.out)),
      mask_(t.attn_mask),
      sinks_(per_head(t.sinks, c.batch, c.q_heads)),
      slopes_(per_head(t.alibi_slopes, c.batch, c.q_heads)) {
  if (mask_) mask_map_ = mask_map(c, *mask_, mask_row_, mask_col_);
  if (t.lse) lse_ = aten::contiguous(*t.lse);
  if (t.grad_lse) grad_lse_ = aten::contiguous(*t.grad_lse);
}

Tangents::Rows Tangents::rows(const OptionalTensor& t) const {
  Rows r;
  if (!t) return r;
  r.tensor = aten::rows_contiguous(*t);
  r.map = head_map(call_, *r.tensor, call_.q_heads);
  r.row = stride_of(*r.tensor, call_.rank - 2);
  return r;
}

void* Tangents::find(const Rows& r, int64_t batch, int64_t head, int64_t begin) const {
  return r.tensor ? HeadWalk(call_, r.map, *r.tensor).at(batch, head, begin) : nullptr;
}

HeadTangents Tangents::at(const Sequences& sequences, int64_t batch, int64_t head) const {
  const int64_t q_begin = sequences.q_begin(batch), k_begin = sequences.k_begin(batch);
  const size_t bh = static_cast<size_t>(batch * call_.q_heads + head);
  const auto of_lse = [&](const OptionalTensor& t) -> void* {
    return t ? lse_at(call_, static_cast<char*>(t->data_ptr()), batch, head, q_begin) : nullptr;
  };
  HeadTangents d;
  d.query = find(query_, batch, head, q_begin), d.q_row = query_.row;
  d.key = find(key_, batch, head, k_begin), d.k_row = key_.row;
  d.value = find(value_, batch, head, k_begin), d.v_row = value_.row;
  d.grad_out = find(grad_out_, batch, head, q_begin), d.grad_out_row = grad_out_.row;
  d.out = find(out_, batch, head, q_begin), d.out_row = out_.row;
  d.lse = of_lse(lse_);
  d.grad_lse = of_lse(grad_lse_);
  if (mask_) d.mask = HeadWalk(call_, mask_map_, *mask_).at(batch, head);
  d.mask_row = mask_row_, d.mask_col = mask_col_;
  if (!sinks_.empty()) d.sink = sinks_[bh];
  if (!slopes_.empty()) d.slope = slopes_[bh];
  return d;
}

}  // namespace attnjourney
