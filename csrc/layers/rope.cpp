#include "rope.h"

#include "core/backend.h"
#include "core/overlap.h"

namespace attnjourney {
namespace {

void check(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_tensor(x.dim() == 4, "x", x, ": expected 4 dimensions (batch, heads, seq, head_dim), got shape ",
               shape_text(x));
  check_floating("x", x);
  const int64_t rotary_dim = check_rotary(cos, sin, x.size(0), x.size(2), "x", x);
  check_value(rotary_dim <= x.size(3), "cos: expected at most head_dim / 2 columns, head_dim is ", x.size(3),
              ", got shape ", shape_text(cos));
}

RotaryLayout layout(bool interleaved) { return interleaved ? RotaryLayout::interleaved : RotaryLayout::half_split; }

}  // namespace

Tensor rope(const Backend& backend, Arguments& in) {
  const Tensor x = in.tensor(), cos = in.tensor(), sin = in.tensor();
  const bool interleaved = in.flag(), inverse = in.flag();
  check(x, cos, sin);
  const Tensor out = aten::empty(x, {x.size(0), x.size(1), x.size(2), x.size(3)});
  backend.rotary(out, cos, sin, layout(interleaved), inverse ? RotaryDirection::inverse : RotaryDirection::forward,
                 aten::rows_contiguous(x));
  return out;
}

void rope_in_place(const Backend& backend, Arguments& in) {
  const Tensor x = in.tensor(), cos = in.tensor(), sin = in.tensor();
  const bool interleaved = in.flag();
  check(x, cos, sin);
  check_value(x.size(3) <= 1 || x.stride(3) == 1,
              "x: expected a dense last dimension to be turned in place, got stride ", x.stride(3));
  check_apart({{"x", x}});
  backend.rotary(x, apart_from(cos, {{"x", x}}), apart_from(sin, {{"x", x}}), layout(interleaved),
                 RotaryDirection::forward, std::nullopt);
}

}  // namespace attnjourney
