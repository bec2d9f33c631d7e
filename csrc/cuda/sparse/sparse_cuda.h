// CUDA's token-sparse attention and its indexer: SparseBackend, IndexerBackend.
#pragma once
#include "sparse/lightning_indexer.h"
#include "sparse/sparse_attention.h"

namespace attnjourney {

void cuda_sparse_forward(const SparseCall&, const SparseInputs&, const SparseResults&);
void cuda_sparse_backward(const SparseCall&, const SparseInputs&, const SparseSaved&, const SparseGradients&);

void cuda_indexer_topk(const IndexerCall&, const IndexerInputs&, const OptionalTensor& key_lengths,
                       const IndexerResults&);
void cuda_indexer_loss(const IndexerCall&, const IndexerInputs&, const IndexerTarget&, const Tensor& loss,
                       const Tensor& grad_scores);
void cuda_indexer_loss_backward(const IndexerCall&, const IndexerInputs&, const Tensor& indices,
                                const Tensor& grad_loss, const Tensor& grad_scores, const IndexerGradients&);

}  // namespace attnjourney
