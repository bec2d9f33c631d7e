// The keys that the indices name for a block of rows: checked once, then listed block by block.
#pragma once
#include <vector>

#include "core/aten.h"
#include "sparse/params.h"

namespace attnjourney {

// Lengths of the batch items; throws where one is not from 0 to kv_len.
std::vector<int64_t> key_lengths_of(const OptionalTensor& key_lengths, int64_t batch, int64_t kv_len);

class IndexLists {
 public:
  // Throws where an index is at or past kv_len. heads: of the indices, 1 or the key/value heads.
  IndexLists(const Tensor& indices, int64_t batch, int64_t heads, int64_t blocks, int64_t kv_len);

  struct List {
    std::vector<int32_t> keys;
    int64_t whole = 0, last = 0;  // see SparseRows
    int64_t n() const { return static_cast<int64_t>(keys.size()); }
  };
  // The keys that rows [first, first + rows) of query see of a block's, in the order of the indices, those that each
  // row sees before the others. `buckets` > 1: by ranges of so many keys together, ascending within each of the two.
  void list(const SparseParams& params, int64_t batch, int64_t head, int64_t block, int64_t length, int64_t first,
            int64_t rows, int64_t bucket, List& to) const;
  // those of a block as they are; below 0: none
  int64_t at(int64_t batch, int64_t head, int64_t block, int64_t i) const {
    const int64_t from = ((batch * heads_ + (heads_ > 1 ? head : 0)) * blocks_ + block) * count_ + i;
    return wide_ ? static_cast<const int64_t*>(data_)[from] : static_cast<const int32_t*>(data_)[from];
  }

 private:
  Tensor kept_;
  const void* data_;
  int64_t heads_, blocks_, count_, kv_len_;
  bool wide_;
};

}  // namespace attnjourney
