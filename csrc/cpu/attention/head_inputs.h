// What the kernels read of one query head, for the walks of forward, backward and jvp.
#pragma once
#include "attention/params.h"
#include "block_lists.h"
#include "head_walk.h"

namespace attnjourney {

class HeadInputs {
 public:
  // query, key, value: those the call was made from; out and dense lse: written by the forward, read by the others
  HeadInputs(const AttentionCall& call, const AttentionOptions& options, const Sequences& sequences,
             const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse)
      : call_(call),
        sequences_(sequences),
        out_map_(head_map(call, out, call.q_heads)),
        query_(call, call.query, query),
        key_(call, call.key, key),
        value_(call, call.value, value),
        out_(call, out_map_, out),
        mask_(call, call.mask, options.attn_mask.value_or(query)),
        lse_(static_cast<char*>(lse.data_ptr())),
        has_mask_(options.attn_mask.has_value()),
        blocks_(call, options),
        sinks_(per_head(options.sinks, call.batch, call.q_heads)),
        slopes_(per_head(options.alibi_slopes, call.batch, call.q_heads)) {}
  HeadInputs(const HeadInputs&) = delete;  // out_ refers to out_map_

  HeadPointers at(int64_t batch, int64_t head) const {
    const int64_t q_begin = sequences_.q_begin(batch), k_begin = sequences_.k_begin(batch);
    const size_t index = static_cast<size_t>(batch * call_.q_heads + head);
    HeadPointers h;
    h.index = static_cast<uint32_t>(index);
    h.query = query_.at(batch, head, q_begin);
    h.key = key_.at(batch, head, k_begin);
    h.value = value_.at(batch, head, k_begin);
    h.mask = has_mask_ ? mask_.at(batch, head) : blocks_.at(batch, head);
    if (!sinks_.empty()) h.sink = sinks_[index];
    if (!slopes_.empty()) h.slope = slopes_[index];
    h.out = out_.at(batch, head, q_begin);
    h.lse = lse_at(call_, lse_, batch, head, q_begin);
    return h;
  }
  const HeadWalk& out() const { return out_; }

 private:
  const AttentionCall& call_;
  const Sequences& sequences_;
  const HeadMap out_map_;
  const HeadWalk query_, key_, value_, out_, mask_;
  char* lse_;
  bool has_mask_;
  const BlockLists blocks_;
  const std::vector<double> sinks_, slopes_;  // [batch * q_heads], or empty
};

}  // namespace attnjourney
