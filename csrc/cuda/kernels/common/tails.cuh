// Rows of packed tensors past the last sequence: what kernels do not write is zeros, or -inf.
#pragma once
#include <cstdint>

namespace attnjourney {

// Rows of 4-byte words, `words` of each head; head, row: strides in bytes; rows: of the tensor, 0: there is none.
struct Tail {
  unsigned char* data;
  int64_t head, row;
  int heads, rows, words;
  const int* begin;    // of the rows that are cleared, on the device
  uint32_t even, odd;  // the words
};
constexpr int kTails = 3;
struct Tails {
  Tail tail[kTails];
};

}  // namespace attnjourney
