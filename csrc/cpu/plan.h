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
  int64_t uncut;   // those before the last ones, which are cut into items of cut_rows: threads end together
  int64_t cut_rows;
  int64_t threads;
  std::vector<int64_t> order, first_item;  // where they are not: batch items by falling cost, the first item of each

  struct Item {
    int64_t batch, head, first, rows;  // rows may be 0: of the last ones of a sequence
  };
  Item at(int64_t item, const Sequences& sequences) const;

 private:
  Item uncut_at(int64_t item, const Sequences& sequences) const;
};
// `left_out`: batch items, ascending, that other kernels compute; none where the items are uniform
ForwardPlan plan_forward(const AttentionCall& call, const Sequences& sequences,
                         const std::vector<int64_t>& left_out = {});

// Key/value heads of some batch items, the largest first; some are cut into parts by key blocks.
struct BackwardPlan {
  struct Piece {
    int64_t item;  // batch * kv_heads + kv_head
    int64_t part, parts;
    int64_t partial;  // the index of its own dQ; a whole head has none
  };
  struct Cut {
    int64_t item, parts, first_partial;
  };
  const AttentionKernels* kernel;
  std::vector<Piece> pieces;
  std::vector<Cut> cuts;
  int64_t partials = 0, most_parts = 1;
  int64_t threads;
};
BackwardPlan plan_backward(const AttentionCall& call, const Sequences& sequences, std::vector<int64_t> items);

}  // namespace attnjourney
