// What the layer operators (mha, gpt_attention, gqa, mla) share: checks of their weights, views that split heads
// without a copy, and matrix products that write into given tensors.
//
// A layer works on rows: (batch, seq, width) seen as (batch * seq, width). Heads are columns of such rows, so query,
// key, value, the attention output and their gradients are views (batch, heads, seq, head_dim) of row buffers.
#pragma once
#include "attention/attention.h"

namespace attnjourney::layer {

// ---- checks ----

// num_heads > 0 and a divisor of width
inline int64_t check_heads(const char* heads_name, int64_t heads, const char* width_name, int64_t width) {
  check_value(heads > 0, heads_name, ": expected a positive number, got ", heads);
  check_value(width % heads == 0, heads_name, ": expected a divisor of ", width_name, ", ", width, ", got ", heads);
  return width / heads;
}

// (batch, seq, embed), floating
inline void check_sequence(const char* name, const Tensor& x) {
  check_tensor(x.dim() == 3, name, x, ": expected 3 dimensions (batch, seq, embed), got shape ", shape_text(x));
  check_value(x.size(2) > 0, name, ": expected a last dimension of at least 1, got shape ", shape_text(x));
  check_floating(name, x);
  // products of a few widths, and of rows and a width, fit in 64 bits
  check_value(x.size(2) < (int64_t{1} << 28) && extent(x.size(0), x.size(1)) < (int64_t{1} << 31), name,
              ": expected an embedding below 2^28 and fewer than 2^31 rows, got shape ", shape_text(x));
}

// (out, in), or (out,) for in < 0, with the dtype and device of `like`
inline void check_weight(const char* name, const Tensor& weight, int64_t out, int64_t in, const char* like_name,
                         const Tensor& like) {
  const bool matrix = in >= 0;
  check_tensor(weight.dim() == (matrix ? 2 : 1) && weight.size(0) == out && (!matrix || weight.size(1) == in), name,
               weight, ": expected shape (", out, matrix ? ", " : ",", matrix ? std::to_string(in) : "", "), got ",
               shape_text(weight));
  check_same_dtype(name, weight, like_name, like);
  check_same_device(name, weight, like_name, like);
}

// (out,) or None
inline void check_bias(const char* name, const OptionalTensor& bias, int64_t out, const char* like_name,
                       const Tensor& like) {
  if (bias) check_weight(name, *bias, out, -1, like_name, like);
}

// What a backward receives back from its forward, and grad_out: exactly this shape and dtype.
inline void check_saved(const char* name, const Tensor& t, IntHeaderOnlyArrayRef shape, const Tensor& like,
                        std::optional<ScalarType> dtype = std::nullopt) {
  bool ok = t.dim() == static_cast<int64_t>(shape.size());
  for (int64_t d = 0; ok && d < t.dim(); d++) ok = t.size(d) == shape[d];
  check_tensor(ok, name, t, ": expected shape ", list_text(shape), ", got ", shape_text(t));
  const ScalarType wanted = dtype.value_or(dtype_of(like));
  check_dtype(dtype_of(t) == wanted, name, t, "dtype ", dtype_text(wanted));
  check_runtime(t.device() == like.device(), name, ": expected to be on the device of the inputs");
}

// the dtype of lse for tensors like x
inline ScalarType lse_dtype(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// a gradient, or the (0,) that stands for one not needed
inline Tensor or_none(const OptionalTensor& grad, const Tensor& like) { return grad ? *grad : aten::none(like); }

// ---- views ----

// (batch, seq, width) -> (batch * seq, width), its row stride kept; copies only where no such view exists
inline Tensor rows(const Tensor& x) {
  const int64_t batch = x.size(0), seq = x.size(1), width = x.size(2);
  const bool dense_rows = width <= 1 || x.stride(2) == 1;
  const bool even_rows = batch <= 1 || seq <= 1 || x.stride(0) == seq * x.stride(1);
  const int64_t row = seq > 1 ? x.stride(1) : x.stride(0);
  if (dense_rows && even_rows && row >= width) return aten::strided_view(x, {batch * seq, width}, {row, 1});
  return aten::strided_view(aten::contiguous(x), {batch * seq, width}, {width, 1});
}

// columns [begin, begin + width) of rows (rows, total)
inline Tensor columns(const Tensor& rows, int64_t begin, int64_t width) {
  return aten::strided_view(rows, {rows.size(0), width}, {rows.stride(0), 1}, begin);
}

// the slice [begin, begin + count) of the first dimension: rows of a weight (out, in), or part of a bias (out,)
inline Tensor slice(const Tensor& t, int64_t begin, int64_t count) {
  if (t.dim() == 1) return aten::strided_view(t, {count}, {t.stride(0)}, begin * t.stride(0));
  return aten::strided_view(t, {count, t.size(1)}, {t.stride(0), t.stride(1)}, begin * t.stride(0));
}
inline OptionalTensor slice(const OptionalTensor& t, int64_t begin, int64_t count) {
  return t ? OptionalTensor(slice(*t, begin, count)) : std::nullopt;
}

// columns [begin, begin + heads * head_dim) of rows (batch * seq, total), as (batch, heads, seq, head_dim).
// head_stride: from one head's columns to the next one's, head_dim unless something lies between them.
inline Tensor split_heads(const Tensor& rows, int64_t batch, int64_t seq, int64_t heads, int64_t head_dim,
                          int64_t begin = 0, int64_t head_stride = -1) {
  const int64_t row = rows.stride(0);
  return aten::strided_view(rows, {batch, heads, seq, head_dim},
                            {seq * row, head_stride < 0 ? head_dim : head_stride, row, 1}, begin);
}

// rows (batch * seq, width) -> (batch, seq, width); rows is dense
inline Tensor sequence(const Tensor& rows, int64_t batch, int64_t seq) {
  const int64_t width = rows.size(1);
  return aten::strided_view(rows, {batch, seq, width}, {seq * width, width, 1});
}

inline Tensor empty_rows(const Tensor& like, int64_t rows, int64_t width) { return aten::empty(like, {rows, width}); }

// ---- products ----
// All write into given tensors: no out= overload is on autocast's lists, so an autocast region around a backward
// changes nothing here.

// (a, b) -> (b, a)
inline Tensor transposed(const Tensor& t) {
  return aten::strided_view(t, {t.size(1), t.size(0)}, {t.stride(1), t.stride(0)});
}

// out = a b; out may be a slice of rows or of columns
inline void mm_into(const Tensor& out, const Tensor& a, const Tensor& b) { aten::call("aten::mm", "out", a, b, out); }

// out += a b. addmm takes Scalars, which the stable ABI cannot pass; aten::linear calls it with a bias of any shape
// that addmm accepts, so the sum so far goes in as the bias.
inline void add_mm_into(const Tensor& out, const Tensor& a, const Tensor& b) {
  aten::call("aten::linear", "out", a, transposed(b), OptionalTensor(out), out);
}

// out (rows, o) = x (rows, i) weight (o, i)^T + bias (o); out may be a slice of columns
inline void linear_into(const Tensor& out, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  aten::call("aten::linear", "out", x, weight, bias, out);
}
inline Tensor linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const Tensor y = empty_rows(x, x.size(0), weight.size(0));
  linear_into(y, x, weight, bias);
  return y;
}

// The backward of y = x W^T + b:  d x = dy W,  d W = dy^T x,  d b = sum over the rows of dy
inline Tensor input_grad(const Tensor& grad_y, const Tensor& weight) {
  const Tensor grad_x = empty_rows(grad_y, grad_y.size(0), weight.size(1));
  mm_into(grad_x, grad_y, weight);
  return grad_x;
}
inline void weight_grad_into(const Tensor& grad_weight, const Tensor& grad_y, const Tensor& x) {
  mm_into(grad_weight, transposed(grad_y), x);
}
inline Tensor weight_grad(const Tensor& grad_y, const Tensor& x) {
  const Tensor grad_weight = empty_rows(grad_y, grad_y.size(1), x.size(1));
  weight_grad_into(grad_weight, grad_y, x);
  return grad_weight;
}
inline void bias_grad_into(const Tensor& grad_bias, const Tensor& grad_y) {
  const int64_t dim = 0;
  aten::call("aten::sum", "IntList_out", grad_y, std::optional<IntHeaderOnlyArrayRef>(IntHeaderOnlyArrayRef(&dim, 1)),
             false, std::optional<ScalarType>(), grad_bias);
}
inline Tensor bias_grad(const Tensor& grad_y) {
  const Tensor grad_bias = aten::empty(grad_y, {grad_y.size(1)});
  bias_grad_into(grad_bias, grad_y);
  return grad_bias;
}

}  // namespace attnjourney::layer
