// ATen from C++ through the stable ABI: views, matrix products and reductions that the layer operators need.
// ATen's own error text is lost on this way: callers check shapes first.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

namespace attnjourney {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace aten {

// RuntimeError for a tensor that could not be had: its shape and bytes, and what ATen says
[[noreturn]] void refuse_allocation(const Tensor& like, IntHeaderOnlyArrayRef sizes, std::optional<ScalarType> dtype);

template <class... Args>
Tensor call(const char* op, const char* overload, const Args&... args) {
  std::array<StableIValue, sizeof...(Args)> stack{torch::stable::detail::from(args)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// A view of the same storage; offset counts elements from t's first one.
inline Tensor strided_view(const Tensor& t, IntHeaderOnlyArrayRef sizes, IntHeaderOnlyArrayRef strides,
                           int64_t offset = 0) {
  AtenTensorHandle view = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), static_cast<int64_t>(sizes.size()),
                                                               sizes.data(), strides.data(), offset, &view));
  return Tensor(view);
}

// A contiguous tensor where `like` is, without the dispatcher, which takes a microsecond.
inline Tensor empty(const Tensor& like, IntHeaderOnlyArrayRef sizes, std::optional<ScalarType> dtype = std::nullopt) {
  constexpr size_t most_dims = 64;  // torch's own bound
  std::array<int64_t, most_dims> strides;
  int64_t stride = 1;
  for (size_t d = std::min(sizes.size(), most_dims); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1))
    strides[d] = stride;
  const auto own = torch::stable::detail::from(dtype ? *dtype : like.scalar_type());
  int32_t device_type = 0, device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle made = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               torch::stable::detail::to<int32_t>(own), device_type, device_index, &made))
    refuse_allocation(like, sizes, dtype);
  return Tensor(made);
}
inline Tensor none(const Tensor& like) { return empty(like, {0}); }  // stands for a gradient that is not needed

inline void clear(Tensor t) { torch::stable::zero_(t); }  // t is written to

inline Tensor sum(const Tensor& a, std::vector<int64_t> dims, bool keepdim = false) {
  return torch::stable::sum(a, std::optional<IntHeaderOnlyArrayRef>(dims), keepdim);
}
inline Tensor contiguous(const Tensor& a) { return a.is_contiguous() ? a : torch::stable::contiguous(a); }
// the last dimension's stride is 1, as every kernel needs
inline bool has_dense_rows(const Tensor& a) { return a.dim() == 0 || a.size(-1) <= 1 || a.stride(-1) == 1; }
inline Tensor rows_contiguous(const Tensor& a) { return has_dense_rows(a) ? a : torch::stable::contiguous(a); }

}  // namespace aten
}  // namespace attnjourney
