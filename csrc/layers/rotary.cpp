#include "rotary.h"

#include "core/checks.h"

namespace attnjourney {
namespace {

void check_table(const char* name, const Tensor& table, int64_t batch, int64_t seq, const char* like_name,
                 const Tensor& like) {
  const bool shared = table.dim() == 2 && table.size(0) == seq;
  const bool own = table.dim() == 3 && table.size(0) == batch && table.size(1) == seq;
  check_tensor(shared || own, name, table, ": expected shape (", seq, ", rotary_dim / 2), one row per position, or (",
               batch, ", ", seq, ", rotary_dim / 2), got ", shape_text(table));
  const ScalarType t = dtype_of(table), wanted = dtype_of(like);
  check_dtype(t == ScalarType::Float || t == wanted, name, table, "dtype ", OrFloat32{wanted, like_name});
  check_same_device(name, table, like_name, like);
}

}  // namespace

int64_t check_rotary(const OptionalTensor& cos, const OptionalTensor& sin, int64_t batch, int64_t seq,
                     const char* like_name, const Tensor& like) {
  check_value(cos.has_value() == sin.has_value(), cos ? "sin" : "cos", ": expected a tensor beside ",
              cos ? "cos" : "sin", ", got None");
  if (!cos) return 0;
  check_table("cos", *cos, batch, seq, like_name, like);
  check_table("sin", *sin, batch, seq, like_name, like);
  check_value(sin->dim() == cos->dim() && sin->size(-1) == cos->size(-1), "sin: expected the shape of cos, ",
              shape_text(*cos), ", got ", shape_text(*sin));
  return 2 * cos->size(-1);
}

}  // namespace attnjourney
