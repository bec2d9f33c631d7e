// Where the keys of a sequence lie in a dense, paged or ring cache.
#pragma once
#include <algorithm>
#include <vector>

#include "cpu/attention/sequences.h"
#include "decode/decode.h"
#include "decode/params.h"

namespace attnjourney {

class CacheWalk {
 public:
  CacheWalk(const DecodeCall& call, const DecodeInputs& in)
      : call_(call),
        key_(plane(in.key)),
        value_(plane(in.value)),
        key_scale_(plane(in.key_scale)),
        value_scale_(plane(in.value_scale)),
        table_(in.block_table ? static_cast<const int32_t*>(in.block_table->const_data_ptr()) : nullptr),
        max_blocks_(in.block_table ? in.block_table->size(1) : 0) {}

  // appends keys [from, to) of (batch, kv head), in pieces that lie together
  void runs(int64_t batch, int64_t head, int64_t from, int64_t to, std::vector<DecodeRun>& found) const {
    const int64_t piece = call_.block_size ? call_.block_size : call_.capacity;
    while (from < to) {
      const int64_t slot = call_.ring || table_ ? from % piece : from;
      const int64_t count = std::min(to - from, piece - slot);
      const int64_t outer = table_ ? table_[batch * max_blocks_ + from / piece] : batch;
      found.push_back({.key = key_.at(outer, head, slot),
                       .value = value_.at(outer, head, slot),
                       .first = from,
                       .count = count,
                       .key_scale = static_cast<const float*>(key_scale_.at(outer, head, slot)),
                       .value_scale = static_cast<const float*>(value_scale_.at(outer, head, slot))});
      from += count;
    }
  }
  // where keys and values of a head begin, of a sequence or block `outer`
  const void* key(int64_t outer, int64_t head) const { return key_.at(outer, head, 0); }
  const void* value(int64_t outer, int64_t head) const { return value_.at(outer, head, 0); }
  int64_t key_row() const { return key_.row; }
  int64_t value_row() const { return value_.row; }

 private:
  struct Plane {
    const char* data;
    int64_t item, outer, head, row;  // bytes of an element; strides in elements
    const void* at(int64_t o, int64_t h, int64_t slot) const {
      return data ? data + (o * outer + h * head + slot * row) * item : nullptr;
    }
  };
  static Plane plane(const Tensor& t) {
    return {static_cast<const char*>(t.const_data_ptr()), item_size(t.scalar_type()), stride_of(t, 0), stride_of(t, 1),
            stride_of(t, 2)};
  }
  static Plane plane(const OptionalTensor& t) { return t ? plane(*t) : Plane{}; }
  const DecodeCall& call_;
  Plane key_, value_, key_scale_, value_scale_;
  const int32_t* table_;
  int64_t max_blocks_;
};

}  // namespace attnjourney
