// The kernels of token-sparse attention and of its indexer, a table for each ISA, and what they are given.
#pragma once
#include "cpu/dispatch.h"
#include "sparse/params.h"

namespace attnjourney {

// Strides count elements; those of derivatives are the gradients' own.
struct SparseKernelParams : SparseParams {
  int64_t q_head = 0, q_row = 0, k_row = 0, v_row = 0;
  int64_t grad_out_head = 0, grad_out_row = 0, grad_q_head = 0, grad_q_row = 0;
};

// Some rows of query that read one key/value head, and the keys that they see, as numbers of rows of key. Row i is row
// i % rows of a block of rows and of head i / rows of the group.
struct SparseRows {
  const void *query = nullptr, *grad_out = nullptr;  // of the group's first head and the block's first row
  const void* grad_lse = nullptr;                    // [group][q_len], or null
  void* grad_query = nullptr;                        // null where not wanted
  int64_t rows = 1, first = 0, count = 0;
  const void *key = nullptr, *value = nullptr;
  const int32_t* keys = nullptr;       // [n]; every row sees the first `whole`, row r of the block of the others
  int64_t n = 0, whole = 0, last = 0;  // those up to last + r
  const double* sinks = nullptr;       // [group]; null: none
};

// Gradients in one dtype, see kernels/sparse/backward.h. Spaces are in bytes, 64-byte aligned; sums of a key have
// dimensions rounded up to `lanes`.
struct SparseKernels {
  int64_t lanes;
  int64_t (*saved_space)(const SparseKernelParams&, int64_t count, int64_t n);
  int64_t (*rows_space)(const SparseKernelParams&, int64_t count, int64_t n);
  void (*rows)(const SparseKernelParams&, const SparseRows&, void* saved, double* grad_sinks, void* space);
  void (*add_keys)(const SparseKernelParams&, const SparseRows&, const void* saved, int64_t begin, int64_t end,
                   void* grad_key, void* grad_value);
  void (*write)(const void* sums, int64_t rows, int64_t cols, void* to, int64_t to_row);
};

// Rows of an indexer's query, consecutive, with their weights in compute precision.
struct IndexerRows {
  const void *query = nullptr, *weights = nullptr;  // of the first head and row; the rows of weights are dense
  int64_t q_head = 0, q_row = 0, weights_head = 0;
};

// The indexer in one dtype: its scores (kernels/sparse/indexer.h) and its loss (kernels/sparse/indexer_loss.h).
struct IndexerKernels {
  int64_t key_block;  // the most keys of a call
  int64_t (*space)(const IndexerParams&, int64_t rows);
  void (*load_rows)(const IndexerParams&, const IndexerRows&, int64_t rows, void* space);
  void (*scores)(const IndexerParams&, int64_t first, int64_t rows, const void* key, int64_t k_row, int64_t n,
                 void* space);
  int64_t (*filter)(const IndexerParams&, int64_t rows, int64_t row, int64_t n, const double* threshold,
                    int32_t* chosen, void* to, void* space);
  int64_t (*loss_space)(const SparseKernelParams&, int64_t count, int64_t n);
  void (*target)(const SparseKernelParams&, const SparseRows&, double* sums, void* space);
  void (*index_scores)(const SparseKernelParams&, const SparseRows&, const void* weights, double* sums, void* space);
  void (*loss_rows)(const SparseKernelParams&, const SparseRows&, const void* weights, const void* grad_scores,
                    void* grad_weights, void* saved, void* space);
};

struct SparseTable {
  void (*gather)(const void* from, int64_t row_bytes, int64_t bytes, const int32_t* keys, int64_t n, void* to);
  SparseKernels of[dtype_count];
  IndexerKernels indexer[dtype_count];
};

}  // namespace attnjourney
