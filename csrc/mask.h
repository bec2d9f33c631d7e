// The only mask rule: which keys a query row may see, before any mask tensor. Host and device.
//
// Row i stands at position p = i + offset. It sees the keys of its window, p - left .. p + right, and the keys below
// `prefix`; never a key at or past key_length. Causal is a window with left unbounded and right = 0.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define ATTNJOURNEY_HD __host__ __device__ inline
#else
#define ATTNJOURNEY_HD __attribute__((always_inline)) inline  // never emitted: it is compiled for several ISAs
#endif

namespace attnjourney {

// Half-open range of keys.
struct KeyRange {
  int64_t begin, end;
  ATTNJOURNEY_HD bool empty() const { return begin >= end; }
};

struct KeyRanges {
  static constexpr int64_t unbounded = int64_t{1} << 40;

  int64_t offset = 0;
  int64_t left = unbounded, right = unbounded;
  int64_t prefix = 0;
  int64_t key_length = 0;

  static ATTNJOURNEY_HD int64_t clamp(int64_t x, int64_t hi) { return x < 0 ? 0 : x < hi ? x : hi; }

  ATTNJOURNEY_HD bool bounded() const { return left < unbounded || right < unbounded; }

  // the window of rows [first, last], all of them together
  ATTNJOURNEY_HD KeyRange any(int64_t first, int64_t last) const {
    return {clamp(first + offset - left, key_length), clamp(last + offset + right + 1, key_length)};
  }
  // the keys in the window of every row of [first, last]
  ATTNJOURNEY_HD KeyRange all(int64_t first, int64_t last) const {
    return {clamp(last + offset - left, key_length), clamp(first + offset + right + 1, key_length)};
  }
  // the rows, of q_len, that see any key of [first, last]
  ATTNJOURNEY_HD KeyRange rows(int64_t first, int64_t last, int64_t q_len) const {
    if (first < prefix) return {0, q_len};
    return {clamp(first - right - offset, q_len), clamp(last + left - offset + 1, q_len)};
  }

  ATTNJOURNEY_HD bool visible(int64_t row, int64_t key) const {
    const int64_t p = row + offset;
    return key < key_length && (key < prefix || (key >= p - left && key <= p + right));
  }
};

}  // namespace attnjourney
