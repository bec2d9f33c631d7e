// CPU entry of the rotation: tables in the type of the arithmetic, the walk over positions and heads, threads.
#include "../rotary.h"

#include "kernels/rotary.h"
#include "rows.h"

namespace attnjourney {

void cpu_rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, RotaryLayout layout, RotaryDirection direction) {
  const int64_t batch = x.size(0), heads = x.size(1), seq = x.size(2), half = x.size(3) / 2;
  const int64_t batch_stride = x.stride(0), head_stride = x.stride(1), seq_stride = x.stride(2);
  if (batch * heads * seq * half == 0) return;
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    // (seq, half): small beside x, so they are converted once and not per head
    const ScalarType table_type = sizeof(C) == 8 ? ScalarType::Double : ScalarType::Float;
    const Tensor c = aten::contiguous(torch::stable::to(cos, table_type));
    const Tensor s = aten::contiguous(torch::stable::to(sin, table_type));
    T* const rows = static_cast<T*>(x.mutable_data_ptr());
    const C* const c_rows = static_cast<const C*>(c.const_data_ptr());
    const C* const s_rows = static_cast<const C*>(s.const_data_ptr());
    const C sign = direction == RotaryDirection::forward ? 1 : -1;
    const auto rotate = layout == RotaryLayout::half_split ? rotate_half_split<T, C> : rotate_interleaved<T, C>;
    parallel_rows(batch * seq, heads * 2 * half, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t b = i / seq, n = i % seq;
        for (int64_t h = 0; h < heads; h++)
          rotate(rows + b * batch_stride + h * head_stride + n * seq_stride, c_rows + n * half, s_rows + n * half, half,
                 sign);
      }
    });
  });
}

}  // namespace attnjourney
