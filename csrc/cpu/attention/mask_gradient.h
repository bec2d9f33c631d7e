// The sum of a float mask's gradient, in the mask's own shape: no (batch, heads, q_len, kv_len) buffer.
//
// Key/value heads that share mask elements take turns (rounds) where the mask has rows and columns: within a round no
// two of them share any, and the parts of one have columns of their own. A mask that broadcasts over rows or columns is
// small: each round and part sums into a copy of its own, and all run together. Either way the order of additions is
// fixed for a number of threads.
#pragma once
#include <vector>

#include "head_walk.h"

namespace attnjourney {

class MaskGradient {
 public:
  // `grad`: what to write, or nullopt; contiguous, in a shape that broadcasts to the call's
  MaskGradient(const AttentionCall& call, const Sequences& sequences, const OptionalTensor& grad, int64_t items);

  // work items batch * kv_heads + kv_head that may run together
  const std::vector<std::vector<int64_t>>& rounds() const { return rounds_; }
  void allocate(int64_t parts);  // before the first round
  void place(HeadGradients& gradients, int64_t item, int64_t part, int64_t batch, int64_t head) const;
  void finish();  // after the last one

 private:
  const AttentionCall& call_;
  OptionalTensor grad_;
  HeadMap map_;
  int64_t row_ = 0, col_ = 0, batch_copies_ = 1, parts_ = 1;
  bool small_ = false;
  bool whole_ = false;  // every row sees every key, so that every element is written
  bool once_ = false;   // heads share no element, and the mask has the dtype of query
  std::vector<std::vector<int64_t>> rounds_;
  std::vector<int64_t> turn_;  // of each item, among those that share its elements
  OptionalTensor sums_;        // [copies, numel]
};

}  // namespace attnjourney
