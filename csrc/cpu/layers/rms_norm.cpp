// CPU entry of RMS normalisation: threads over rows, and the sum over rows for the weight's gradient.
#include <cmath>

#include "cpu/kernels/rows/rms_norm.h"
#include "cpu/layers/rows_cpu.h"
#include "cpu/rows.h"

namespace attnjourney {
namespace {

template <class T>
struct Rows {  // (rows, width), dense last dimension
  T* data;
  int64_t stride;
  T* operator[](int64_t i) const { return data + i * stride; }
};
template <class T>
Rows<const T> read(const Tensor& t) {
  return {static_cast<const T*>(t.const_data_ptr()), t.stride(0)};
}
template <class T>
Rows<T> write(const Tensor& t) {
  return {static_cast<T*>(t.mutable_data_ptr()), t.stride(0)};
}

}  // namespace

void cpu_rms_forward(const Tensor& x, const Tensor& weight, double eps, const Tensor& y, const Tensor& rstd) {
  const int64_t width = x.size(1);
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    const auto in = read<T>(x);
    const auto out = write<T>(y);
    const T* w = static_cast<const T*>(weight.const_data_ptr());
    C* r = static_cast<C*>(rstd.mutable_data_ptr());
    parallel_rows(x.size(0), width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        r[i] = 1 / std::sqrt(sum_of_squares<C>(in[i], width) / static_cast<C>(width) + static_cast<C>(eps));
        rms_apply(out[i], in[i], w, r[i], width);
      }
    });
  });
}

void cpu_rms_apply(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& y) {
  const int64_t width = x.size(1);
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    const auto in = read<T>(x);
    const auto out = write<T>(y);
    const T* w = static_cast<const T*>(weight.const_data_ptr());
    const C* r = static_cast<const C*>(rstd.const_data_ptr());
    parallel_rows(x.size(0), width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) rms_apply(out[i], in[i], w, r[i], width);
    });
  });
}

namespace {

// The rows are cut into at most 64 blocks whose sums are added in order: the result does not depend on the threads.
template <class T>
void grad_weight_rows(const Tensor& grad_y, const Tensor& x, const Tensor& rstd, const Tensor& grad_weight) {
  using C = Compute<T>;
  const int64_t rows = x.size(0), width = x.size(1);
  const int64_t block = std::max<int64_t>(16, (rows + 63) / 64), blocks = (rows + block - 1) / block;
  std::vector<C> sums(static_cast<size_t>(std::max<int64_t>(1, blocks) * width));
  const auto dy = read<T>(grad_y), in = read<T>(x);
  const C* r = static_cast<const C*>(rstd.const_data_ptr());
  parallel_rows(blocks, block * width, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++)
      for (int64_t i = b * block; i < std::min(rows, (b + 1) * block); i++)
        rms_add_grad_weight(sums.data() + b * width, dy[i], in[i], r[i], width);
  });
  T* out = static_cast<T*>(grad_weight.mutable_data_ptr());
  for (int64_t j = 0; j < width; j++) {
    C sum = 0;
    for (int64_t b = 0; b < blocks; b++) sum += sums[static_cast<size_t>(b * width + j)];
    store_one(out + j, sum);
  }
}

}  // namespace

void cpu_rms_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                      const OptionalTensor& grad_x, const OptionalTensor& grad_weight) {
  const int64_t width = x.size(1);
  dispatch_floating(x.scalar_type(), [&](auto type) {
    using T = decltype(type);
    using C = Compute<T>;
    if (grad_weight) grad_weight_rows<T>(grad_y, x, rstd, *grad_weight);
    if (!grad_x) return;
    const auto dy = read<T>(grad_y), in = read<T>(x);
    const auto dx = write<T>(*grad_x);
    const T* w = static_cast<const T*>(weight.const_data_ptr());
    const C* r = static_cast<const C*>(rstd.const_data_ptr());
    parallel_rows(x.size(0), width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) rms_grad_x(dx[i], dy[i], in[i], w, r[i], width);
    });
  });
}

}  // namespace attnjourney
