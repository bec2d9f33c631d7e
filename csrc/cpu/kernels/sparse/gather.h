// Rows that indices name, side by side.
#pragma once
#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

// from[keys[i]] -> to[i], `bytes` of each, rows `row` bytes apart; rows to come are prefetched, for they lie anywhere
ATTN_NOINLINE void gather_rows(const void* from_, int64_t row, int64_t bytes, const int32_t* keys, int64_t n,
                               void* to) {
  const char* const from = static_cast<const char*>(from_);
  const int64_t ahead = bytes >= 1024 ? 4 : 8;
  for (int64_t i = 0; i < n; i++) {
    if (i + ahead < n) {
      const char* const next = from + keys[i + ahead] * row;
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(next + b);
    }
    memcpy(static_cast<char*>(to) + i * bytes, from + keys[i] * row, size_t(bytes));
  }
}

}  // namespace
}  // namespace attnjourney
