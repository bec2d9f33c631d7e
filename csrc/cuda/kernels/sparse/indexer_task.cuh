// The parameters of the kernels that train the indexer. Its heads are the items of a row (task.cuh) with one key head,
// and no values.
#pragma once
#include "topk.cuh"

namespace attnjourney {

struct IndexerTask {
  SparseTask index;       // query, key, indices of the indexer; grad_query
  SparseTask attention;   // query, key, the same indices, of the attention that it predicts; lse, stats: a workspace
  const void* weights;    // [batch, heads, q_len] in the type of the arithmetic, dense
  void* target;           // [batch, q_len, index_count]: sums of the attention's weights over the heads
  void* loss;             // [batch, q_len]
  void* grad_scores;      // [batch, q_len, index_count]; until indexer_loss the scores themselves
  const void* grad_loss;  // [batch, q_len]
  void* grad_weights;     // like weights
};

}  // namespace attnjourney
