// What the kernels read of one query head, for the walks of forward, backward and jvp.
#pragma once
#include "attention/params.h"
#include "block_lists.h"
#include "head_walk.h"

namespace attnjourney {

class HeadInputs {
 public:
  // out, dense lse and stats: written by the forward, read by the others
  HeadInputs(const AttentionCall& call, const Sequences& sequences, const Tensor& out, const Tensor& lse,
             const Tensor& stats)
      : call_(call),
        sequences_(sequences),
        out_map_(head_map(call, out, call.q_heads)),
        query_(call, call.query_map, call.args.query),
        key_(call, call.key_map, call.args.key),
        value_(call, call.value_map, call.args.value),
        out_(call, out_map_, out),
        lse_(static_cast<char*>(lse.data_ptr())),
        stats_(static_cast<char*>(stats.data_ptr())),
        blocks_(call) {
    const auto& [attn_mask, cu_seqlens_q, cu_seqlens_k, block_table, blocks, dropout_p, is_causal, scale, enable_gqa,
                 causal_alignment, window, prefix_length, key_lengths, query_lengths, softcap, sinks, alibi_slopes,
                 origin, dropout_seed] = call.args.options;
    if (attn_mask) mask_.emplace(call, call.mask_map, *attn_mask);
    sinks_ = per_head(sinks, call.batch, call.q_heads);
    slopes_ = per_head(alibi_slopes, call.batch, call.q_heads);
    if (block_table) {
      pages_ = static_cast<const int32_t*>(block_table->const_data_ptr());
      most_pages_ = block_table->size(1);
    }
    if (const auto& fp8 = call.args.fp8) {
      query_scale_.emplace(call, call.query_scale_map, fp8->query);
      key_scale_.emplace(call, call.key_scale_map, fp8->key);
      value_scale_.emplace(call, call.value_scale_map, fp8->value);
    }
    (void)blocks;                                                                    // blocks_
    (void)key_lengths, (void)query_lengths, (void)cu_seqlens_q, (void)cu_seqlens_k;  // Sequences
    // AttentionParams
    (void)dropout_p, (void)is_causal, (void)scale, (void)enable_gqa, (void)causal_alignment, (void)window;
    (void)prefix_length, (void)softcap, (void)origin, (void)dropout_seed;
  }
  HeadInputs(const HeadInputs&) = delete;  // out_ refers to out_map_

  HeadPointers at(int64_t batch, int64_t head) const {
    const int64_t q_begin = sequences_.q_begin(batch), k_begin = sequences_.k_begin(batch);
    const size_t index = static_cast<size_t>(batch * call_.q_heads + head);
    HeadPointers h;
    h.index = dropout_head(call_, batch, head);
    h.query = query_.at(batch, head, q_begin);
    h.key = key_.at(batch, head, k_begin);
    h.value = value_.at(batch, head, k_begin);
    if (pages_) h.pages = pages_ + batch * most_pages_;
    h.mask = mask_ ? mask_->at(batch, head) : blocks_.at(batch, head);
    if (!sinks_.empty()) h.sink = sinks_[index];
    if (!slopes_.empty()) h.slope = slopes_[index];
    if (query_scale_) {
      h.query_scale = static_cast<const float*>(query_scale_->at(batch, head));
      h.key_scale = static_cast<const float*>(key_scale_->at(batch, head));
      h.value_scale = static_cast<const float*>(value_scale_->at(batch, head));
    }
    h.out = out_.at(batch, head, q_begin);
    h.lse = lse_at(call_, lse_, batch, head, q_begin);
    h.stats = lse_at(call_, stats_, batch, head, q_begin, 2);
    return h;
  }
  const HeadWalk& out() const { return out_; }
  // those of a batch item's heads from this one on, or null
  const double* sinks(int64_t batch, int64_t head) const { return numbers(sinks_, batch, head); }
  const double* slopes(int64_t batch, int64_t head) const { return numbers(slopes_, batch, head); }

 private:
  const double* numbers(const std::vector<double>& of_heads, int64_t batch, int64_t head) const {
    return of_heads.empty() ? nullptr : of_heads.data() + batch * call_.q_heads + head;
  }

  const AttentionCall& call_;
  const Sequences& sequences_;
  const HeadMap out_map_;
  const HeadWalk query_, key_, value_, out_;
  std::optional<HeadWalk> mask_, query_scale_, key_scale_, value_scale_;
  char *lse_, *stats_;
  const BlockLists blocks_;
  std::vector<double> sinks_, slopes_;  // [batch * q_heads], or empty
  const int32_t* pages_ = nullptr;      // [batch][most_pages_]
  int64_t most_pages_ = 0;
};

}  // namespace attnjourney
