// The one place for argument checks: every message names the argument, what was expected and what came.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cctype>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "errors.h"

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
    out << "torch.";
    for (const char* c = torch::headeronly::toString(d.type); *c; c++)
      out << static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
    return out;
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

// TypeError in Python for None in place of a tensor that is needed; asked where a check has failed
inline void check_given(const char* name, const Tensor& t) {
  if (!t.defined()) throw TypeFault(text(name, ": must be Tensor, not NoneType"));
}

// ValueError where `t` is not as expected, TypeError where it is None
template <class... Parts>
void check_tensor(bool ok, const char* name, const Tensor& t, const Parts&... parts) {
  if (ok) [[likely]]
    return;
  check_given(name, t);
  check_value(false, name, parts...);
}

// also those dtypes that the stable interface cannot name, and Undefined for None
inline ScalarType dtype_of(const Tensor& t) {
  int32_t code = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  return static_cast<ScalarType>(code);
}

// Throws where `t` has another dtype than is expected.
template <class... Parts>
void check_dtype(bool ok, const char* name, const Tensor& t, const Parts&... expected) {
  if (ok) [[likely]]
    return;
  check_given(name, t);
  check_runtime(false, name, ": expected ", expected..., ", got ", dtype_text(dtype_of(t)));
}

// What is computed from sizes fits in 64 bits: the product of them, 0 counting as 1, is at most this.
constexpr int64_t most_numbers = int64_t{1} << 56;
// that product, or more than most_numbers
template <class... Sizes>
int64_t extent(int64_t first, Sizes... rest) {
  int64_t product = 1;
  for (const int64_t size : {first, static_cast<int64_t>(rest)...}) {
    if (size > most_numbers / product) return most_numbers + 1;
    if (size > 1) product *= size;
  }
  return product;
}
// The stride of a dimension that is walked: 0 where it has one item, whose stride may be any number. `d` below 0: of a
// dimension that is not there.
inline int64_t stride_of(const Tensor& t, int64_t d) { return d >= 0 && t.size(d) > 1 ? t.stride(d) : 0; }

inline bool has_shape(const Tensor& t, const std::vector<int64_t>& want) {
  bool same = t.dim() == static_cast<int64_t>(want.size());
  for (size_t d = 0; same && d < want.size(); d++) same = t.size(static_cast<int64_t>(d)) == want[d];
  return same;
}

// meaning: the shape in words, "(batch, heads, ...)"
inline void check_shape(const char* name, const Tensor& t, const std::vector<int64_t>& shape, const char* meaning) {
  check_tensor(has_shape(t, shape), name, t, ": expected shape ", meaning, " = ", list_text(shape), ", got ",
               shape_text(t));
}

inline void check_extent(const char* name, const Tensor& t) {
  const int64_t numbers = t.numel();
  if (numbers > 0 && numbers <= most_numbers) [[likely]]
    return;
  int64_t product = numbers > most_numbers ? numbers : 1;
  for (int64_t d = 0; d < t.dim() && product <= most_numbers; d++) product = extent(product, t.size(d));
  check_value(product <= most_numbers, name, ": expected at most 2^56 numbers, got shape ", shape_text(t));
}

inline bool is_attention_dtype(ScalarType t) {
  return t == ScalarType::Float || t == ScalarType::Double || t == ScalarType::BFloat16 || t == ScalarType::Half;
}

inline void check_floating(const char* name, const Tensor& t) {
  check_dtype(is_attention_dtype(dtype_of(t)), name, t,
              "dtype torch.float32, torch.float64, torch.bfloat16 or torch.float16");
  check_extent(name, t);
}

inline void check_same_dtype(const char* name, const Tensor& t, const char* like_name, const Tensor& like) {
  check_dtype(dtype_of(t) == dtype_of(like), name, t, "the dtype of ", like_name, ", ", dtype_text(dtype_of(like)));
}

inline void check_same_device(const char* name, const Tensor& t, const char* like_name, const Tensor& like) {
  if (t.device() != like.device()) {
    check_given(name, t);
    check_runtime(false, name, ": expected to be on the device of ", like_name,
                  ", but the two are on different devices");
  }
  check_extent(name, t);
}

inline void check_dim(const char* name, const Tensor& t, int64_t dim) {
  check_tensor(t.dim() == dim, name, t, ": expected ", dim, " dimensions, got shape ", shape_text(t));
}

// "torch.float16 (query's) or torch.float32", what a tensor beside one of that dtype may have
struct OrFloat32 {
  ScalarType type;
  const char* whose;
  friend std::ostream& operator<<(std::ostream& out, const OrFloat32& d) {
    if (d.type != ScalarType::Float) out << dtype_text(d.type) << " (" << d.whose << "'s) or ";
    return out << dtype_text(ScalarType::Float);
  }
};

inline void check_dropout(double p) {
  check_value(p >= 0.0 && p <= 1.0, "dropout_p: expected a number between 0 and 1, got ", p);
}

}  // namespace attnjourney
