// What differs between the batch items of a call: lengths, packed parts, numbers per head. Reads the tensors' data.
#pragma once
#include <vector>

#include "attention/attention.h"

namespace attnjourney {

int64_t item_size(ScalarType t);
std::vector<int64_t> index_values(const Tensor& t);  // of an int32 or int64 tensor
// [batch * heads]; empty without a tensor
std::vector<double> per_head(const OptionalTensor&, int64_t batch, int64_t heads);

// pairs of query and key that are computed, per head; an estimate for sharing out work
double visible_pairs(const AttentionParams&);

class Sequences {
 public:
  // Throws where a length does not fit.
  explicit Sequences(const AttentionCall&);
  bool uniform() const { return list_.empty(); }  // every batch item has the params of the call
  AttentionParams params(int64_t batch) const;    // with the lengths and key ranges of one item
  int64_t q_len(int64_t batch) const { return uniform() ? call_.params.q_len : list_[batch].q_len; }
  int64_t q_begin(int64_t batch) const { return call_.packed ? list_[batch].q_begin : 0; }  // in the length dimension
  int64_t k_begin(int64_t batch) const { return call_.packed ? list_[batch].k_begin : 0; }
  AttentionParams largest() const;  // q_len and kv_len are the largest of all
  // row blocks of the length dimension that belong to no sequence: f(batch, first row, count); batch 0 if packed
  template <class F>
  void unused_rows(const F& f) const {
    if (call_.packed) return f(int64_t{0}, used_q_, call_.params.q_len - used_q_);
    for (int64_t b = 0; b < static_cast<int64_t>(list_.size()); b++)
      if (list_[b].q_len < call_.params.q_len) f(b, list_[b].q_len, call_.params.q_len - list_[b].q_len);
  }
  int64_t used_keys() const { return used_k_; }  // of packed keys

 private:
  struct Item {
    int64_t q_begin, q_len, k_begin, kv_len, key_length;
  };
  const AttentionCall& call_;
  std::vector<Item> list_;
  int64_t used_q_ = 0, used_k_ = 0;
};

}  // namespace attnjourney
