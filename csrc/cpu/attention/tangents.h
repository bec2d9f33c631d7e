// Where the tangents of one head begin.
#pragma once
#include "head_walk.h"

namespace attnjourney {

class Tangents {
 public:
  Tangents(const AttentionCall& call, const AttentionTangents& tangents);
  HeadTangents at(const Sequences& sequences, int64_t batch, int64_t head) const;

 private:
  struct Rows {  // (..., heads, length, dim)
    OptionalTensor tensor;
    HeadMap map;
    int64_t row = 0;
  };
  Rows rows(const OptionalTensor& t) const;
  void* find(const Rows& rows, int64_t batch, int64_t head, int64_t begin) const;

  const AttentionCall& call_;
  Rows query_, key_, value_, grad_out_, out_;
  OptionalTensor mask_, lse_, grad_lse_;
  HeadMap mask_map_;
  int64_t mask_row_ = 0, mask_col_ = 0;
  std::vector<double> sinks_, slopes_;  // [batch * q_heads], or empty
};

}  // namespace attnjourney
