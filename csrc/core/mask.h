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

// Half-open range of keys or rows.
template <class Int>
struct KeyRangeOf {
  Int begin, end;
  ATTNJOURNEY_HD bool empty() const { return begin >= end; }
};

template <class Int>
struct KeyRangesOf {
  using KeyRange = KeyRangeOf<Int>;
  static constexpr Int unbounded = Int{1} << (sizeof(Int) == 8 ? 40 : 29);  // 32 bits: lengths below 2^28

  Int offset = 0;
  Int left = unbounded, right = unbounded;
  Int prefix = 0;
  Int key_length = 0;

  static ATTNJOURNEY_HD Int clamp(Int x, Int hi) { return x < 0 ? 0 : x < hi ? x : hi; }

  ATTNJOURNEY_HD bool bounded() const { return left < unbounded || right < unbounded; }

  // the window of rows [first, last], all of them together
  ATTNJOURNEY_HD KeyRange any(Int first, Int last) const {
    return {clamp(first + offset - left, key_length), clamp(last + offset + right + 1, key_length)};
  }
  // the keys in the window of every row of [first, last]
  ATTNJOURNEY_HD KeyRange all(Int first, Int last) const {
    return {clamp(last + offset - left, key_length), clamp(first + offset + right + 1, key_length)};
  }
  // the rows, of q_len, that see any key of [first, last]
  ATTNJOURNEY_HD KeyRange rows(Int first, Int last, Int q_len) const {
    if (first < prefix) return {0, q_len};
    return {clamp(first - right - offset, q_len), clamp(last + left - offset + 1, q_len)};
  }

  // the rows, of q_len, that see all keys of [first, last]
  ATTNJOURNEY_HD KeyRange rows_of_all(Int first, Int last, Int q_len) const {
    if (last >= key_length) return {0, 0};
    if (last < prefix) return {0, q_len};
    return {clamp(last - right - offset, q_len), clamp(first + left - offset + 1, q_len)};
  }

  ATTNJOURNEY_HD bool visible(Int row, Int key) const {
    const Int p = row + offset;
    return key < key_length && (key < prefix || (key >= p - left && key <= p + right));
  }
};

using KeyRange = KeyRangeOf<int64_t>;
using KeyRanges = KeyRangesOf<int64_t>;

}  // namespace attnjourney
