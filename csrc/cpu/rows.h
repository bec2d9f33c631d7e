// Shared by the CPU's row kernels: the switch over dtypes and the split of rows over threads.
#pragma once
#include <algorithm>

#include "core/aten.h"
#include "cpu/kernels/common/common.h"
#include "threads.h"

namespace attnjourney {

// f(T{}) with the kernels' type of a floating dtype
template <class F>
void dispatch_floating(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::Double:
      return f(double{});
    case ScalarType::BFloat16:
      return f(bf16{});
    case ScalarType::Half:
      return f(f16{});
    default:
      return f(float{});
  }
}

// f(begin, end) over the rows, each of `width` numbers; a thread gets at least 16384 numbers (10 us of work)
template <class F>
void parallel_rows(int64_t rows, int64_t width, const F& f) {
  in_ranges(rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width)), f);
}

}  // namespace attnjourney
