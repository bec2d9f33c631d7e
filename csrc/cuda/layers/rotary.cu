// CUDA entry of the rotation: tables in the type of the arithmetic, strides, vectors where rows allow them.
#include <torch/csrc/stable/accelerator.h>

#include "rows.h"
#include "rows_cuda.h"

namespace attnjourney {

void cuda_rotary(const Tensor& x, const Tensor& cos, const Tensor& sin, RotaryLayout layout, RotaryDirection direction,
                 const OptionalTensor& from) {
  const int64_t batch = x.size(0), heads = x.size(1), seq = x.size(2), dim = x.size(3), half = cos.size(-1);
  if (batch * heads * seq * dim == 0 || (half == 0 && !from)) return;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Device device = current_device(x);
  const ScalarType table_type = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Tensor c = aten::contiguous(torch::stable::to(cos, table_type));
  const Tensor s = aten::contiguous(torch::stable::to(sin, table_type));
  check_value(heads * dim < (int64_t{1} << 30) && seq < (int64_t{1} << 31),
              "x: expected fewer than 2^30 numbers of one position and 2^31 positions on CUDA, got shape ",
              shape_text(x));

  RotaryTask p{};
  const auto strides = [](const Tensor& t) { return Strides{t.stride(0), t.stride(1), t.stride(2)}; };
  p.x = x.data_ptr(), p.x_strides = strides(x);
  if (from) p.from = from->data_ptr(), p.from_strides = strides(*from);
  p.cos = c.data_ptr(), p.sin = s.data_ptr(), p.table_batch = cos.dim() == 3 ? seq * half : 0;
  p.positions = batch * seq, p.seq = static_cast<int>(seq), p.heads = static_cast<int>(heads);
  p.dim = static_cast<int>(dim), p.half = static_cast<int>(half);
  p.interleaved = layout == RotaryLayout::interleaved, p.inverse = direction == RotaryDirection::inverse;

  const Number n = number_of(x);
  const auto even = [&](const void* data, const Strides& t) { return in_vectors(data, n, {t.batch, t.head, t.row}); };
  const bool vectors = in_vectors(p.cos, n, {half}) && in_vectors(p.sin, n, {from ? dim : 0}) &&
                       even(p.x, p.x_strides) && (!from || even(p.from, p.from_strides));
  sm80_rotary(p, n, vectors, current_stream(device.index));
}

}  // namespace attnjourney
