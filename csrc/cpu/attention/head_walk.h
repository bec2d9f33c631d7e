// Where (batch, head) of a tensor begins.
#pragma once
#include "sequences.h"

namespace attnjourney {

class HeadWalk {
 public:
  HeadWalk(const AttentionCall& call, const HeadMap& map, const Tensor& t)
      : call_(call), map_(map), base_(static_cast<char*>(t.data_ptr())), item_(item_size(t.scalar_type())) {
    row_ = call.packed ? stride_of(t, call.rank - 2) : 0;
  }
  // `begin`: the first row of a packed sequence
  void* at(int64_t batch, int64_t head, int64_t begin = 0) const {
    int64_t offset = head / map_.head_div * map_.head_stride + begin * row_;
    for (int d = call_.batch_dims - 1; d >= 0; d--) {
      offset += batch % call_.batch_size[d] * map_.batch_stride[d];
      batch /= call_.batch_size[d];
    }
    return base_ + offset * item_;
  }

  const HeadMap& map() const { return map_; }

 private:
  const AttentionCall& call_;
  const HeadMap& map_;
  char* base_;
  int64_t item_, row_;
};

// lse and its gradient: [batch, q_heads, q_len] dense, or [q_heads, total] packed; stats: with two `numbers` a row
inline char* lse_at(const AttentionCall& c, char* base, int64_t batch, int64_t head, int64_t begin,
                    int64_t numbers = 1) {
  const int64_t row = c.packed ? head * c.params.q_len + begin : (batch * c.q_heads + head) * c.params.q_len;
  return base + row * numbers * item_size(c.lse_dtype);
}

}  // namespace attnjourney
