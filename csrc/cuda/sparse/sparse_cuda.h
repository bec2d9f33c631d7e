// CUDA's token-sparse attention: SparseBackend.
#pragma once
#include "sparse/sparse_attention.h"

namespace attnjourney {

void cuda_sparse_forward(const SparseCall&, const SparseInputs&, const SparseResults&);
void cuda_sparse_backward(const SparseCall&, const SparseInputs&, const SparseSaved&, const SparseGradients&);

}  // namespace attnjourney
