// What kernels of token-sparse attention and of its indexer need to know. Pointers and numbers only: no torch.
#pragma once
#include <cstdint>

#include "attention/params.h"

namespace attnjourney {

// How many keys, from the first one, query row i may see.
struct KeyLimit {
  int64_t q_len = 0;
  bool causal = false;        // row i of batch item b sees key j only if j <= i + position(b)
  bool bottom_right = false;  // position(b) = length(b) - q_len, else 0; length(b): the item's key_length or kv_len
  ATTNJOURNEY_HD int64_t limit(int64_t i, int64_t length) const {
    if (!causal) return length;
    const int64_t end = i + 1 + (bottom_right ? length - q_len : 0);
    return end < 0 ? 0 : end < length ? end : length;
  }
};

// One call of sparse attention. Row i of query reads row i / rows of the indices: key j is seen where an index names
// it, once for each time. An index below 0, one at or past the row's length and, where the call is causal, one past the
// row's position names nothing. Strides count elements; the last dimension of every tensor is dense.
struct SparseParams : KeyLimit {
  int64_t kv_len = 0;
  int64_t head_dim = 0, v_head_dim = 0;
  int64_t group = 1;        // query heads per key/value head
  int64_t rows = 1;         // of query, consecutive, that share a row of indices
  int64_t index_count = 0;  // of a row of indices
  double scale = 1;
  ScoreModifier modifier;
};

// One call of the indexer: score(t, s) = sum_h weights[h][t] relu(scale query[h][t] . key[s])
struct IndexerParams : KeyLimit {
  int64_t heads = 0, kv_len = 0, head_dim = 0;
  int64_t topk = 0;
  double scale = 1;
};

}  // namespace attnjourney
