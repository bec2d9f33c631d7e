// The lightning indexer of DeepSeek-V3.2: the keys of the highest scores for each row, and the loss that trains it.
// Legal inputs, the operators over what a device supplies.
#pragma once
#include "core/arguments.h"
#include "params.h"

namespace attnjourney {

struct IndexerInputs {
  Tensor query;    // (batch, heads, q_len, head_dim)
  Tensor key;      // (batch, kv_len, head_dim)
  Tensor weights;  // (batch, heads, q_len), query's dtype or float (double for double)
  double scale = 1;
};

struct IndexerCall {
  int64_t batch = 0;
  IndexerParams params;
  ScalarType dtype = ScalarType::Float, score_dtype = ScalarType::Float;
};

// of the keys of each row: dense, ascending, then -1; and their scores, then -inf
struct IndexerResults {
  Tensor indices;  // (batch, q_len, topk) int32
  Tensor scores;   // (batch, q_len, topk) float (double for double)
};

// The attention whose weights, summed over the heads and divided by their sum over the chosen keys, the indexer is
// trained to predict.
struct IndexerTarget {
  Tensor query;    // (batch, q_heads, q_len, head_dim), the dtype of the indexer's query
  Tensor key;      // (batch, kv_heads, kv_len, head_dim), kv_heads a divisor of q_heads
  Tensor indices;  // (batch, q_len, index_count) int32 or int64; below 0: none
  double scale = 1;
};

// of query, key, weights: dense; none where not wanted
struct IndexerGradients {
  OptionalTensor query, key, weights;
};

struct IndexerBackend {
  void (*topk)(const IndexerCall&, const IndexerInputs&, const OptionalTensor& key_lengths, const IndexerResults&);
  // loss (batch, q_len): the Kullback-Leibler divergence KL(target || softmax of the scores) over the chosen keys.
  // grad_scores (batch, q_len, index_count): its derivative by the scores. Both dense, in score_dtype.
  void (*loss)(const IndexerCall&, const IndexerInputs&, const IndexerTarget&, const Tensor& loss,
               const Tensor& grad_scores);
  void (*loss_backward)(const IndexerCall&, const IndexerInputs&, const Tensor& indices, const Tensor& grad_loss,
                        const Tensor& grad_scores, const IndexerGradients&);
};

struct Backend;
// indices, scores
std::vector<Tensor> lightning_indexer(const Backend&, Arguments&);
// loss, grad_scores
std::vector<Tensor> lightning_indexer_loss_forward(const Backend&, Arguments&);
// of query, key, weights: bit i of need asks for gradient i
std::vector<Tensor> lightning_indexer_loss_backward(const Backend&, Arguments&);

}  // namespace attnjourney
