// Entries of token-sparse attention and its indexer on the CPU.
#pragma once
#include "sparse/lightning_indexer.h"
#include "sparse/sparse_attention.h"

namespace attnjourney {

void cpu_sparse_forward(const SparseCall&, const SparseInputs&, const SparseResults&);
void cpu_sparse_backward(const SparseCall&, const SparseInputs&, const SparseSaved&, const SparseGradients&);
void cpu_indexer_topk(const IndexerCall&, const IndexerInputs&, const OptionalTensor& key_lengths,
                      const IndexerResults&);
void cpu_indexer_loss(const IndexerCall&, const IndexerInputs&, const IndexerTarget&, const Tensor& loss,
                      const Tensor& grad_scores);
void cpu_indexer_loss_backward(const IndexerCall&, const IndexerInputs&, const Tensor& indices, const Tensor& grad_loss,
                               const Tensor& grad_scores, const IndexerGradients&);

}  // namespace attnjourney
