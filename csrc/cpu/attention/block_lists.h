// A mask of blocks as the kernels read it: one BlockRows for each head.
#pragma once
#include <optional>
#include <vector>

#include "head_walk.h"

namespace attnjourney {

class BlockLists {
 public:
  // Throws where a list is not what the kernels rely on.
  explicit BlockLists(const AttentionCall& call);
  BlockLists(const BlockLists&) = delete;

  const void* at(int64_t batch, int64_t head) const {
    return heads_.empty() ? nullptr : &heads_[static_cast<size_t>(batch * call_.q_heads + head)];
  }

 private:
  const AttentionCall& call_;
  std::optional<BlockTensors> dense_;  // keeps contiguous copies alive
  std::vector<BlockRows> heads_;       // [batch * q_heads]; empty without a mask of blocks
};

}  // namespace attnjourney
