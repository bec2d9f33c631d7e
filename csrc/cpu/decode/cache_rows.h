// What the CPU entries of the caches share: rows as memory, how new ones are written, and the checks of values.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/plan.h"
#include "cpu/threads.h"
#include "decode/kv_cache.h"

namespace attnjourney {

// Rows (outer, head, slot) of a tensor (outer, heads, slots, dim) with a dense last dimension, or the numbers of one
// without it.
class CacheRows {
 public:
  explicit CacheRows(const Tensor& t) : data_(static_cast<char*>(t.data_ptr())) {
    const int64_t item = item_size(t.scalar_type());
    outer_ = stride_of(t, 0) * item, head_ = stride_of(t, 1) * item, slot_ = stride_of(t, 2) * item;
    bytes_ = t.dim() == 4 ? t.size(3) * item : item;
  }
  char* at(int64_t outer, int64_t head, int64_t slot) const {
    return data_ + outer * outer_ + head * head_ + slot * slot_;
  }
  size_t row_bytes() const { return static_cast<size_t>(bytes_); }
  void copy(int64_t outer, int64_t head, int64_t slot, const CacheRows& from, int64_t from_outer, int64_t from_head,
            int64_t from_slot) const {
    std::memcpy(at(outer, head, slot), from.at(from_outer, from_head, from_slot), row_bytes());
  }

 private:
  char* data_;
  int64_t outer_, head_, slot_, bytes_;
};

// Writes tokens (batch, heads, tokens, dim) into a cache (outer, heads, slots, dim): as they are, or beside scales
// (outer, heads, slots) as bytes.
class TokenWriter {
 public:
  TokenWriter(const Tensor& cache, const OptionalTensor& scale, const Tensor& tokens)
      : rows_(aten::rows_contiguous(tokens)), to_(cache), from_(rows_), dim_(cache.size(3)) {
    if (!scale) return;
    scales_.emplace(*scale);
    quantize_ = quantized_kernels(tokens.scalar_type(), cache.scalar_type()).quantize;
  }
  void write(int64_t outer, int64_t head, int64_t slot, int64_t batch, int64_t token) const {
    if (!scales_) return to_.copy(outer, head, slot, from_, batch, head, token);
    const float scale = quantize_(from_.at(batch, head, token), dim_, to_.at(outer, head, slot));
    std::memcpy(scales_->at(outer, head, slot), &scale, sizeof scale);
  }
  // a token of the cache to another place in it
  void move(int64_t outer, int64_t head, int64_t slot, int64_t from_outer, int64_t from_slot) const {
    to_.copy(outer, head, slot, to_, from_outer, head, from_slot);
    if (scales_) scales_->copy(outer, head, slot, *scales_, from_outer, head, from_slot);
  }

 private:
  Tensor rows_;  // holds what from_ reads
  CacheRows to_, from_;
  std::optional<CacheRows> scales_;
  float (*quantize_)(const void* row, int64_t n, void* bytes) = nullptr;
  int64_t dim_;
};

// f(begin, end) over (batch, head) pairs, each of `width` numbers
template <class F>
void parallel_tokens(int64_t pairs, int64_t width, const F& f) {
  in_ranges(pairs, std::max<int64_t>(1, 32768 / std::max<int64_t>(1, width)), f);
}

// new tokens of each batch row, checked
inline std::vector<int64_t> new_tokens(const AppendInputs& in) {
  const int64_t batch = in.lengths.size(0), n = in.key.size(2);
  std::vector<int64_t> counts(static_cast<size_t>(batch), n);
  if (!in.counts) return counts;
  const int64_t* const given = static_cast<const int64_t*>(in.counts->const_data_ptr());
  for (int64_t b = 0; b < batch; b++) {
    check_length("counts", b, given[b], n, "the tokens given");
    counts[static_cast<size_t>(b)] = given[b];
  }
  return counts;
}

// the data of new_lengths, each from 0 to its row's length
inline const int64_t* checked_truncation(const Tensor& lengths, const Tensor& new_lengths) {
  const int64_t batch = lengths.size(0);
  const int64_t* const have = static_cast<const int64_t*>(lengths.const_data_ptr());
  const int64_t* const wanted = static_cast<const int64_t*>(new_lengths.const_data_ptr());
  for (int64_t b = 0; b < batch; b++) check_length("new_lengths", b, wanted[b], have[b], "the present length");
  return wanted;
}

// the data of batch_index, each the number of a batch row
inline const int64_t* checked_batch_index(const Tensor& batch_index, const Tensor& lengths) {
  const int64_t batch = lengths.size(0);
  const int64_t* const index = static_cast<const int64_t*>(batch_index.const_data_ptr());
  for (int64_t b = 0; b < batch; b++) check_length("batch_index", b, index[b], batch - 1, "the last batch row");
  return index;
}

}  // namespace attnjourney
