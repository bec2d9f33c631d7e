// Root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467) inside the layer operators:
// y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps), row by row.
#pragma once
#include "core/aten.h"

namespace attnjourney {

// What a device supplies. x, grad_x (rows, width) have any row stride and a dense last dimension; y, grad_y (rows,
// width), rstd (rows,), weight, grad_weight (width,) are dense. Computed in float32, float64 for float64, which is also
// the dtype of rstd.
struct RmsNormBackend {
  void (*forward)(const Tensor& x, const Tensor& weight, double eps, const Tensor& y, const Tensor& rstd);
  // y again, from the rstd of the forward
  void (*apply)(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& y);
  // writes the gradients that are given
  void (*backward)(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& rstd,
                   const OptionalTensor& grad_x, const OptionalTensor& grad_weight);
};

}  // namespace attnjourney
