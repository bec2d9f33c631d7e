// CUDA entry of RMS normalisation, which the layer operators use.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>

#include "rows.h"
#include "rows_cuda.h"

namespace attnjourney {
namespace {

RmsTask task(const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  RmsTask p{};
  p.x = x.data_ptr(), p.weight = weight.data_ptr(), p.rstd = rstd.data_ptr();
  p.rows = x.size(0), p.x_row = x.stride(0), p.width = static_cast<int>(x.size(1)),
  p.inverse_width = 1.0 / static_cast<double>(x.size(1));
  check_value(x.size(1) < (int64_t{1} << 30), "rms_norm: expected rows of fewer than 2^30 numbers on CUDA, got shape ",
              shape_text(x));
  return p;
}

bool rows_in_vectors(const RmsTask& p, Number n) {
  return in_vectors(p.x, n, {p.x_row, p.width}) && in_vectors(p.weight, n, {}) && in_vectors(p.out, n, {p.out_row}) &&
         in_vectors(p.grad_y, n, {});
}

void write_rows(RmsTask p, const Tensor& x, const Tensor& y) {
  if (p.rows == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Device device = current_device(x);
  p.out = y.data_ptr(), p.out_row = y.stride(0);
  const Number n = number_of(x);
  sm80_rms_forward(p, n, rows_in_vectors(p, n), current_stream(device.index));
}

}  // namespace

void cuda_rms_forward(const Tensor& x, const Tensor& weight, double eps, const Tensor& y, const Tensor& rstd) {
  RmsTask p = task(x, weight, rstd);
  p.eps = eps;
  write_rows(p, x, y);
}

void cuda_rms_apply(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& y) {
  RmsTask p = task(x, weight, rstd);
  p.given = true;
  write_rows(p, x, y);
}

void cuda_rms_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                       const OptionalTensor& grad_x, const OptionalTensor& grad_weight) {
  RmsTask p = task(x, weight, rstd);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Device device = current_device(x);
  const cudaStream_t stream = current_stream(device.index);
  const Number n = number_of(x);
  p.grad_y = grad_y.data_ptr();
  if (grad_weight) {
    p.span = static_cast<int>(std::max<int64_t>(16, (p.rows + 127) / 128));
    p.spans = static_cast<int>((p.rows + p.span - 1) / p.span);
    const Tensor parts = aten::empty(x, {p.spans, x.size(1)}, rstd.scalar_type());
    p.parts = parts.data_ptr(), p.grad_weight = grad_weight->data_ptr();
    sm80_rms_grad_weight(p, n, stream);
  }
  if (!grad_x || p.rows == 0) return;
  p.out = grad_x->data_ptr(), p.out_row = grad_x->stride(0);
  sm80_rms_grad_x(p, n, rows_in_vectors(p, n), stream);
}

}  // namespace attnjourney
