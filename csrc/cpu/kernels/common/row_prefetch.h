// The rows that the next chunk or tile will read or write, prefetched a few at a time between the register tiles of
// this one: the hardware's prefetcher stops at every page, and rows of a chunk, or of a mask's block, are shorter.
#pragma once
#include "common.h"

namespace attnjourney {
inline namespace ATTN_ISA {

class RowPrefetch {
 public:
  // rows of `cols` numbers, the first of them at x
  template <class T>
  ATTN_INLINE void add(const T* x, int64_t ld, int64_t cols) {
    streams_[count_++] = {reinterpret_cast<const char*>(x), ld * int64_t(sizeof(T)), cols * int64_t(sizeof(T))};
  }
  ATTN_INLINE void start(int64_t rows) { left_ = rows; }
  ATTN_INLINE void step() {
    if (left_ <= 0) return;
    for (int s = 0; s < count_; s++) {
      Stream& x = streams_[s];
      for (int r = 0; r < rows_a_step; r++, x.row += x.stride)
        for (int64_t i = 0; i < x.width; i += 64) __builtin_prefetch(x.row + i, 0, 2);
    }
    left_ -= rows_a_step;
  }

 private:
  static constexpr int rows_a_step = 2;
  struct Stream {
    const char* row;
    int64_t stride, width;  // bytes
  };
  Stream streams_[6];
  int count_ = 0;
  int64_t left_ = 0;
};

}  // namespace ATTN_ISA
}  // namespace attnjourney
