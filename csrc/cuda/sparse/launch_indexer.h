// The launch functions of the lightning indexer, those of each dtype.
#pragma once
#include "cuda/kernels/sparse/indexer_plan.cuh"
#include "cuda/launch.h"

namespace attnjourney {

// Which kernels take a call; 0: ordinary arithmetic, all but 16-bit numbers in whole chunks.
struct IndexerChoice {
  int columns;  // 64 or 128
  int target;   // of the attention that the indexer predicts: 128, 256 or 576
  bool one;     // one row of query a block, for the choice of keys
};

struct IndexerLaunches {
  TopkPlan (*plan)(const IndexerParams&, int batch, const IndexerChoice&, int blocks, int64_t bytes);
  void (*topk)(const TopkTask&, const TopkPlan&, const IndexerChoice&, cudaStream_t);
  void (*loss)(const IndexerTask&, const IndexerChoice&, cudaStream_t);
  void (*query_gradient)(const IndexerTask&, const IndexerChoice&, cudaStream_t);
  void (*key_gradient)(const IndexerTask&, const SparsePairs&, const SparseParts&, const IndexerChoice&, cudaStream_t);
};
extern const IndexerLaunches sm80_indexer_bf16, sm80_indexer_fp16, sm80_indexer_fp32, sm80_indexer_fp64;

}  // namespace attnjourney
