// How a call is shared out over tiles and threads. Used by the entries, and told by attnjourney.explain.
#pragma once
#include "../attention.h"
#include "dispatch.h"

namespace attnjourney {

DType kernel_dtype(ScalarType t);

struct ForwardPlan {
  const AttentionKernels* kernel;
  int64_t heads;   // batch * q_heads
  int64_t rows;    // query rows of a work item
  int64_t blocks;  // work items per head
  int64_t threads;
};
ForwardPlan plan_forward(const AttentionCall& call);

struct BackwardPlan {
  const AttentionKernels* kernel;
  int64_t items;  // batch * kv_heads
  int64_t whole;  // key/value heads that are one work item each
  int64_t parts;  // work items of each head that is left, split by key blocks
  int64_t threads;
};
BackwardPlan plan_backward(const AttentionCall& call);

}  // namespace attnjourney
