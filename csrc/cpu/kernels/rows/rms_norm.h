// RMS normalisation of one row. T: the rows' type as it lies in memory; Real: that of the arithmetic, float or double.
#pragma once
#include "cpu/kernels/common/common.h"

namespace attnjourney {
namespace {

constexpr int64_t rms_lanes = 16;  // independent sums: they vectorize without reordering, and round less than one

// sum over j of f(j)
template <class Real, class F>
Real lane_sum(int64_t width, const F& f) {
  Real lane[rms_lanes] = {};
  const int64_t whole = width / rms_lanes * rms_lanes;
  for (int64_t j = 0; j < whole; j += rms_lanes)
    for (int64_t l = 0; l < rms_lanes; l++) lane[l] += f(j + l);
  for (int64_t l = 0; l < width - whole; l++) lane[l] += f(whole + l);
  for (int64_t n = rms_lanes / 2; n > 0; n /= 2)
    for (int64_t l = 0; l < n; l++) lane[l] += lane[l + n];
  return lane[0];
}

template <class Real, class T>
Real sum_of_squares(const T* x, int64_t width) {
  return lane_sum<Real>(width, [x](int64_t j) { return load_one(x + j) * load_one(x + j); });
}

template <class T, class Real>
void rms_apply(T* y, const T* x, const T* weight, Real rstd, int64_t width) {
  for (int64_t j = 0; j < width; j++) store_one(y + j, load_one(x + j) * rstd * load_one(weight + j));
}

// With g = grad_y * weight: grad_x = rstd * (g - x * rstd^2 * mean(g * x)).
template <class T, class Real>
void rms_grad_x(T* grad_x, const T* grad_y, const T* x, const T* weight, Real rstd, int64_t width) {
  const Real dot =
      lane_sum<Real>(width, [=](int64_t j) { return load_one(grad_y + j) * load_one(weight + j) * load_one(x + j); });
  const Real mean = rstd * rstd * dot / static_cast<Real>(width);
  for (int64_t j = 0; j < width; j++)
    store_one(grad_x + j, rstd * (load_one(grad_y + j) * load_one(weight + j) - load_one(x + j) * mean));
}

// sum (width,) += grad_y * x * rstd
template <class T, class Real>
void rms_add_grad_weight(Real* sum, const T* grad_y, const T* x, Real rstd, int64_t width) {
  for (int64_t j = 0; j < width; j++) sum[j] += load_one(grad_y + j) * load_one(x + j) * rstd;
}

}  // namespace
}  // namespace attnjourney
