// CPU entry of rope: the operator over the CPU's rotation.
#include "../rope.h"

namespace attnjourney {
namespace {

Tensor out_of_place(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved, bool inverse) {
  return rope(cpu_rotary, x, cos, sin, interleaved, inverse);
}
void in_place(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved) {
  rope_in_place(cpu_rotary, x, cos, sin, interleaved);
}

}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("rope", TORCH_BOX(&attnjourney::out_of_place));
  m.impl("rope_", TORCH_BOX(&attnjourney::in_place));
}
