// Rows of keys or values as a key block takes them: in place where they lie in one piece, those of several pages of a
// cache side by side in scratch, which costs little beside the products of a tile.
#pragma once
#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

template <class T>
struct PlacedRows {
  const T* first;
  int64_t ld;
};

template <class T>
struct PagedRows {
  int64_t ld, page_stride, columns;
  T* copy;  // [row][line(columns)]

  static int64_t line(int64_t columns) { return round_up(columns, 64 / int64_t(sizeof(T))); }

  // rows [begin, begin + n) of `base`; page_size 0: there are no pages
  ATTN_INLINE PlacedRows<T> placed(const T* base, const int32_t* pages, int64_t page_size, int64_t begin,
                                   int64_t n) const {
    if (!page_size) return {base + begin * ld, ld};
    return from_pages(base, pages, page_size, begin, n);
  }

 private:
  ATTN_NOINLINE PlacedRows<T> from_pages(const T* base, const int32_t* pages, int64_t size, int64_t begin,
                                         int64_t n) const {
    const auto at = [&](int64_t row) { return base + pages[row / size] * page_stride + row % size * ld; };
    if (n > 0 && begin / size == (begin + n - 1) / size) return {at(begin), ld};
    for (int64_t done = 0; done < n;) {
      const int64_t piece = min_of(n - done, size - (begin + done) % size);
      const T* const from = at(begin + done);
      for (int64_t i = 0; i < piece; i++)
        memcpy(copy + (done + i) * line(columns), from + i * ld, size_t(columns) * sizeof(T));
      done += piece;
    }
    return {copy, line(columns)};
  }
};

}  // namespace
}  // namespace attnjourney
