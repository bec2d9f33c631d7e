#include "rope.h"

#include "core/checks.h"

namespace attnjourney {
namespace {

void check(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  check_value(x.dim() == 4, "x: expected 4 dimensions (batch, heads, seq, head_dim), got shape ", shape_text(x));
  check_floating("x", x);
  const int64_t rotary_dim = check_rotary(cos, sin, x.size(0), x.size(2), "x", x);
  check_value(rotary_dim <= x.size(3), "cos: expected at most head_dim / 2 columns, head_dim is ", x.size(3),
              ", got shape ", shape_text(cos));
}

RotaryLayout layout(bool interleaved) { return interleaved ? RotaryLayout::interleaved : RotaryLayout::half_split; }

}  // namespace

Tensor rope(RotaryKernel rotary, const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
            bool inverse) {
  check(x, cos, sin);
  const Tensor out = aten::empty(x, {x.size(0), x.size(1), x.size(2), x.size(3)});
  rotary(out, cos, sin, layout(interleaved), inverse ? RotaryDirection::inverse : RotaryDirection::forward,
         aten::rows_contiguous(x));
  return out;
}

void rope_in_place(RotaryKernel rotary, const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check(x, cos, sin);
  check_value(x.size(3) <= 1 || x.stride(3) == 1,
              "x: expected a dense last dimension to be turned in place, got stride ", x.stride(3));
  rotary(x, cos, sin, layout(interleaved), RotaryDirection::forward, std::nullopt);
}

}  // namespace attnjourney

// rope is linear in x: its backward is rope with the other `inverse`, its forward derivative rope itself.
STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def(
      "rope(Tensor x, Tensor cos, Tensor sin, *, bool interleaved=False, bool inverse=False) "
      "-> Tensor");
  m.def("rope_(Tensor(a!) x, Tensor cos, Tensor sin, *, bool interleaved=False) -> ()");
}
