// CPU entry of the rotation: tables in the type of the arithmetic, the walk over positions and heads, threads.
#include "cpu/kernels/rows/rotary.h"
#include "cpu/layers/rows_cpu.h"
#include "cpu/rows.h"

namespace attnjourney {
namespace {

struct Strides {  // of (batch, heads, seq, dim), dense in the last
  int64_t batch, head, seq;
};
Strides strides_of(const Tensor& x) { return {x.stride(0), x.stride(1), x.stride(2)}; }

}  // namespace

void cpu_rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, RotaryLayout layout, RotaryDirection direction,
                const OptionalTensor& from) {
  const int64_t batch = x.size(0), heads = x.size(1), seq = x.size(2), dim = x.size(3), half = cos.size(-1);
  const Strides to = strides_of(x), source = strides_of(from ? *from : x);
  if (batch * heads * seq * dim == 0) return;
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    // ([batch,] seq, half): small next to x, so they are converted once and not per head
    const ScalarType table_type = sizeof(C) == 8 ? ScalarType::Double : ScalarType::Float;
    const Tensor c = aten::contiguous(torch::stable::to(cos, table_type));
    const Tensor s = aten::contiguous(torch::stable::to(sin, table_type));
    const int64_t table_stride = cos.dim() == 3 ? seq * half : 0;  // from one sequence's table to the next one's
    T* const rows = static_cast<T*>(x.mutable_data_ptr());
    const T* const source_rows = from ? static_cast<const T*>(from->const_data_ptr()) : nullptr;
    const C* const c_rows = static_cast<const C*>(c.const_data_ptr());
    const C* const s_rows = static_cast<const C*>(s.const_data_ptr());
    const C sign = direction == RotaryDirection::forward ? 1 : -1;
    const auto rotate = layout == RotaryLayout::half_split ? rotate_half_split<T, C> : rotate_interleaved<T, C>;
    parallel_rows(batch * seq, heads * dim, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t b = i / seq, n = i % seq, table = b * table_stride + n * half;
        for (int64_t h = 0; h < heads; h++) {
          T* const row = rows + b * to.batch + h * to.head + n * to.seq;
          if (source_rows) std::copy_n(source_rows + b * source.batch + h * source.head + n * source.seq, dim, row);
          rotate(row, c_rows + table, s_rows + table, half, sign);
        }
      }
    });
  });
}

}  // namespace attnjourney
