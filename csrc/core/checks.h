// The one place for argument checks: every message names the argument, what was expected and what came.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace attnjourney {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream s;
  (s << ... << parts);
  return s.str();
}

// "(2, 3, 4)", as Python prints a shape; made when it is printed, for a call that is right prints nothing
template <class Size>
struct ShapeText {
  int64_t dim;
  Size size;  // of dimension i
  friend std::ostream& operator<<(std::ostream& out, const ShapeText& s) {
    out << "(";
    for (int64_t i = 0; i < s.dim; i++) out << (i ? ", " : "") << s.size(i);
    return out << (s.dim == 1 ? ",)" : ")");
  }
};
inline auto shape_text(const Tensor& t) {
  return ShapeText{t.dim(), [&t](int64_t i) { return t.size(i); }};
}
template <class List>  // of sizes
auto list_text(const List& list) {
  return ShapeText{static_cast<int64_t>(list.size()), [&list](int64_t i) { return list[static_cast<size_t>(i)]; }};
}

// "torch.float32", as Python prints a dtype
struct DtypeText {
  ScalarType type;
  friend std::ostream& operator<<(std::ostream& out, const DtypeText& d) {
    // ScalarType's own names are those of old C types
    constexpr std::pair<ScalarType, const char*> names[] = {
        {ScalarType::Double, "float64"},
        {ScalarType::Float, "float32"},
        {ScalarType::Half, "float16"},
        {ScalarType::BFloat16, "bfloat16"},
        {ScalarType::Bool, "bool"},
        {ScalarType::Byte, "uint8"},
        {ScalarType::Char, "int8"},
        {ScalarType::Short, "int16"},
        {ScalarType::Int, "int32"},
        {ScalarType::Long, "int64"},
        {ScalarType::ComplexHalf, "complex32"},
        {ScalarType::ComplexFloat, "complex64"},
        {ScalarType::ComplexDouble, "complex128"},
    };
    for (const auto& [type, name] : names)
      if (type == d.type) return out << "torch." << name;
    return out << torch::headeronly::toString(d.type);
  }
};
inline DtypeText dtype_text(ScalarType t) { return {t}; }

// ValueError in Python: a shape or a number is wrong
template <class... Parts>
void check_value(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    throw std::invalid_argument(text(parts...));
}

// RuntimeError in Python, as PyTorch's own operators raise for a wrong dtype or device
template <class... Parts>
void check_runtime(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    throw std::runtime_error(text(parts...));
}

inline bool is_attention_dtype(ScalarType t) {
  return t == ScalarType::Float || t == ScalarType::Double || t == ScalarType::BFloat16 || t == ScalarType::Half;
}

inline void check_floating(const char* name, const Tensor& t) {
  check_runtime(is_attention_dtype(t.scalar_type()), name,
                ": expected dtype torch.float32, torch.float64, torch.bfloat16 or torch.float16, got ",
                dtype_text(t.scalar_type()));
}

inline void check_same_dtype(const char* name, const Tensor& t, const char* like_name, const Tensor& like) {
  check_runtime(t.scalar_type() == like.scalar_type(), name, ": expected the dtype of ", like_name, ", ",
                dtype_text(like.scalar_type()), ", got ", dtype_text(t.scalar_type()));
}

inline void check_same_device(const char* name, const Tensor& t, const char* like_name, const Tensor& like) {
  check_runtime(t.device() == like.device(), name, ": expected to be on the device of ", like_name,
                ", but the two are on different devices");
}

inline void check_dim(const char* name, const Tensor& t, int64_t dim) {
  check_value(t.dim() == dim, name, ": expected ", dim, " dimensions, got shape ", shape_text(t));
}

inline void check_dropout(double p) {
  check_value(p >= 0.0 && p <= 1.0, "dropout_p: expected a number between 0 and 1, got ", p);
}

}  // namespace attnjourney
