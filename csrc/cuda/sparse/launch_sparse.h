// The launch functions of token-sparse attention, those of each dtype.
#pragma once
#include "cuda/kernels/sparse/plan.cuh"
#include "cuda/launch.h"

namespace attnjourney {

// Which kernels take a call. columns: 64, 128 or 256, of 16-bit numbers in whole chunks; latents: 576; others: 0.
struct SparseChoice {
  int columns;
  bool latent;  // values are the front of their keys
  bool many;    // more than 16 items of a unit
  bool small;   // Device::small()
};

struct SparseLaunches {
  void (*forward)(const SparseTask&, const SparseChoice&, cudaStream_t);
  void (*delta)(const SparseTask&, cudaStream_t);
  void (*sinks)(const SparseTask&, int64_t count, cudaStream_t);
  void (*query_gradient)(const SparseTask&, const SparseChoice&, cudaStream_t);
  void (*key_gradients)(const SparseTask&, const SparsePairs&, const SparseParts&, const SparseChoice&, cudaStream_t);
  void (*round)(const float* from, void* to, int64_t count, cudaStream_t);  // of 16-bit dtypes
};
extern const SparseLaunches sm80_sparse_bf16, sm80_sparse_fp16, sm80_sparse_fp32, sm80_sparse_fp64;

}  // namespace attnjourney
