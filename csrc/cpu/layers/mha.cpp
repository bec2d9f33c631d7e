// CPU entry of mha: the layer over the CPU's attention.
#include "layers/mha.h"

#include "layers/layers.h"

namespace attnjourney {
constexpr auto mha_forward_cpu = &layer::On<cpu_attention, mha_forward>::call;
constexpr auto mha_backward_cpu = &layer::On<cpu_attention, mha_backward>::call;
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("mha_forward", TORCH_BOX(attnjourney::mha_forward_cpu));
  m.impl("mha_backward", TORCH_BOX(attnjourney::mha_backward_cpu));
}
