// The mask rule: which keys a query row sees, before any mask tensor. Host and device. Kernels ask for the form they
// need, and none combines prefix and window by itself: a mask that is another range of keys changes this file alone.
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

// The keys that some rows see: [0, prefix) and [begin, end), prefix <= begin <= end. The two may touch; the second may
// be empty.
template <class Int>
struct VisibleKeysOf {
  Int prefix, begin, end;

  ATTNJOURNEY_HD Int count() const { return prefix + end - begin; }
  // the key of this number among them, in order; and how many of them lie before a key of theirs
  ATTNJOURNEY_HD Int key(Int number) const { return number < prefix ? number : number - prefix + begin; }
  ATTNJOURNEY_HD Int number(Int key) const { return key <= prefix ? key : key - begin + prefix; }

  // do the n keys from this number on lie in one piece and in `every`, which is part of these?
  ATTNJOURNEY_HD bool one_piece_of(const VisibleKeysOf& every, Int number, Int n) const {
    if (number + n <= prefix) return true;
    return number >= prefix && key(number) >= every.begin && key(number) + n <= every.end;
  }

  // all of it is evaluated: branches would cost registers in kernels
  ATTNJOURNEY_HD bool hides(Int key) const { return (key >= end) | ((key < begin) & (key >= prefix)); }
  // do all of [first, last) lie in one of the two ranges?
  ATTNJOURNEY_HD bool one_holds(Int first, Int last) const { return last <= prefix || (first >= begin && last <= end); }
  // keys that lie in one piece: the last of the two ranges, with the first one where they touch
  ATTNJOURNEY_HD KeyRangeOf<Int> last() const {
    if (begin == end) return {0, prefix};
    return {begin == prefix ? 0 : begin, end};
  }
  // more than `margin` keys away from both ranges, between them
  ATTNJOURNEY_HD bool between(Int key, Int margin) const { return key >= prefix + margin && key < begin - margin; }
  // from the first of them to the last
  ATTNJOURNEY_HD KeyRangeOf<Int> hull() const { return {prefix > 0 ? 0 : begin, begin < end ? end : prefix}; }
  // the same counted from key `first`
  ATTNJOURNEY_HD VisibleKeysOf from(Int first) const { return {prefix - first, begin - first, end - first}; }
};

// What some rows see of the keys of a tile, counted from its first one: all that any row sees lies in [begin, end)
// (and, where prefix and window share the tile, what lies between them), [all_begin, all_end) is seen by every row.
// Hidden keys alone: {0, 0, 0, 0}.
template <class Int>
struct TileKeysOf {
  Int begin, all_begin, all_end, end;
  ATTNJOURNEY_HD bool empty() const { return begin >= end; }
  // every row sees all of the tile's n keys
  ATTNJOURNEY_HD bool whole(Int n) const { return all_begin == 0 && all_end == n; }
};

// Always prefix <= key_length: see set_length.
template <class Int>
struct KeyRangesOf {
  using KeyRange = KeyRangeOf<Int>;
  using VisibleKeys = VisibleKeysOf<Int>;
  using TileKeys = TileKeysOf<Int>;
  static constexpr Int unbounded = Int{1} << (sizeof(Int) == 8 ? 40 : 29);  // 32 bits: lengths below 2^28

  Int offset = 0;
  Int left = unbounded, right = unbounded;
  Int prefix = 0;
  Int key_length = 0;

  ATTNJOURNEY_HD void set_length(Int length) {
    key_length = length;
    prefix = prefix < length ? prefix : length;
  }
  // the same in 32 bits
  ATTNJOURNEY_HD KeyRangesOf<int> narrow() const {
    using Narrow = KeyRangesOf<int>;
    Narrow x;
    x.offset = static_cast<int>(offset);
    x.left = left < Narrow::unbounded ? static_cast<int>(left) : Narrow::unbounded;
    x.right = right < Narrow::unbounded ? static_cast<int>(right) : Narrow::unbounded;
    x.prefix = static_cast<int>(prefix), x.key_length = static_cast<int>(key_length);
    return x;
  }

  ATTNJOURNEY_HD bool bounded() const { return left < unbounded || right < unbounded; }
  // false: a row sees all keys up to its last one
  ATTNJOURNEY_HD bool bounded_left() const { return left < unbounded; }
  // the most keys that `rows` consecutive rows can see
  ATTNJOURNEY_HD Int most(Int rows) const {
    if (left >= unbounded) return key_length;
    const Int keys = prefix + left + rows + (right < unbounded ? right : unbounded - 1);
    return keys < key_length ? keys : key_length;
  }

  ATTNJOURNEY_HD bool visible(Int row, Int key) const {
    const Int p = row + offset;
    return key < key_length && (key < prefix || (key >= p - left && key <= p + right));
  }

  // the keys that any of rows [first, last] sees
  ATTNJOURNEY_HD VisibleKeys any(Int first, Int last) const { return united(window_of_any(first, last)); }
  // the keys that each of them sees
  ATTNJOURNEY_HD VisibleKeys all(Int first, Int last) const { return united(window_of_all(first, last)); }
  // those of one row; where the two ranges touch, one of them
  ATTNJOURNEY_HD VisibleKeys row(Int i) const {
    const KeyRange window = window_of_any(i, i);
    if (window.begin > prefix) return {prefix, window.begin, window.end};
    return {0, 0, higher(window.end, prefix)};
  }

  // the keys [key, key + n) as rows [first, last] see them
  ATTNJOURNEY_HD TileKeys tile(Int first, Int last, Int key, Int n) const {
    KeyRange any = window_of_any(first, last), all = window_of_all(first, last);
    const Int end = key + n;
    if (prefix > key) {
      const bool window = higher(any.begin, key) < lower(any.end, end);
      any = {key, window ? higher(any.end, prefix) : prefix};
      all = {key, all.begin > prefix ? prefix : higher(all.end, prefix)};
    }
    TileKeys t;
    t.begin = higher(any.begin, key) - key;
    t.end = lower(any.end, end) - key;
    t.all_begin = higher(all.begin, key) - key;
    t.all_end = lower(all.end, end) - key;
    if (t.begin >= t.end) t.begin = t.end = 0;
    if (t.all_begin >= t.all_end) t.all_begin = t.all_end = t.end;
    return t;
  }

  // the rows of [row, end) that see any key of [first, last]; with keys past key_length, as if these were there
  ATTNJOURNEY_HD KeyRange rows(Int first, Int last, Int row, Int end) const {
    if (first >= key_length) return {row, row};
    if (first < prefix) return {row, end};
    return {clamp(first - right - offset, row, end), clamp(last + left - offset + 1, row, end)};
  }
  ATTNJOURNEY_HD KeyRange rows(Int first, Int last, Int end) const { return rows(first, last, 0, end); }
  // the rows of [0, end) that see all of them; where the prefix ends among them, those with all of them in the window
  ATTNJOURNEY_HD KeyRange rows_of_all(Int first, Int last, Int end) const {
    if (last >= key_length) return {0, 0};
    if (last < prefix) return {0, end};
    return {clamp(last - right - offset, 0, end), clamp(first + left - offset + 1, 0, end)};
  }

 private:
  static ATTNJOURNEY_HD Int lower(Int a, Int b) { return a < b ? a : b; }
  static ATTNJOURNEY_HD Int higher(Int a, Int b) { return a > b ? a : b; }
  static ATTNJOURNEY_HD Int clamp(Int x, Int low, Int high) { return x < low ? low : x < high ? x : high; }

  // the windows of rows [first, last], all of them together, and what lies in each of them
  ATTNJOURNEY_HD KeyRange window_of_any(Int first, Int last) const {
    return {clamp(first + offset - left, 0, key_length), clamp(last + offset + right + 1, 0, key_length)};
  }
  ATTNJOURNEY_HD KeyRange window_of_all(Int first, Int last) const {
    return {clamp(last + offset - left, 0, key_length), clamp(first + offset + right + 1, 0, key_length)};
  }
  ATTNJOURNEY_HD VisibleKeys united(KeyRange window) const {
    const Int begin = higher(window.begin, prefix);
    return {prefix, begin, higher(window.end, begin)};
  }
};

using KeyRange = KeyRangeOf<int64_t>;
using KeyRanges = KeyRangesOf<int64_t>;
using TileKeys = TileKeysOf<int64_t>;
using VisibleKeys = VisibleKeysOf<int64_t>;

}  // namespace attnjourney
