// How a call is shared out over tiles and threads. Used by the entries, and reported by attnjourney.explain.
#pragma once
#include <vector>

#include "attention/attention.h"
#include "cpu/attention/sequences.h"
#include "dispatch.h"

namespace attnjourney {

DType kernel_dtype(ScalarType t);
const AttentionKernels& kernels_for(const AttentionCall& call);
const DecodeKernels& decode_kernels(ScalarType t);
const QuantizedKernels& quantized_kernels(ScalarType rows, ScalarType bytes);
// of queries of one dtype and a cache of the same or of bytes
const DecodeKernels& decode_kernels(ScalarType query, ScalarType cache);

struct ForwardPlan {
  const AttentionKernels* kernel;
  int64_t heads;   // of a batch item
  int64_t rows;    // query rows of a work item
  int64_t blocks;  // work items per head, where the batch items are uniform
  int64_t items;   // all work items
  int64_t threads;
  std::vector<int64_t> order, first_item;  // where they are not: batch items by falling cost, the first item of each

  struct Item {
    int64_t batch, head, block;
  };
  Item at(int64_t item, const Sequences& sequences) const;
};
ForwardPlan plan_forward(const AttentionCall& call, const Sequences& sequences);

// Key/value heads of some batch items: the first `split` of `items` are cut into `parts` by key blocks.
struct BackwardPlan {
  const AttentionKernels* kernel;
  std::vector<int64_t> items;  // batch * kv_heads + kv_head
  int64_t split, parts;
  int64_t threads;
};
BackwardPlan plan_backward(const AttentionCall& call, const Sequences& sequences, std::vector<int64_t> items);

}  // namespace attnjourney
