// CPU entry of gpt_attention: the layer over the CPU's attention.
#include "layers/gpt_attention.h"

#include "layers/layers.h"

namespace attnjourney {
constexpr auto gpt_attention_forward_cpu = &layer::On<cpu_attention, gpt_attention_forward>::call;
constexpr auto gpt_attention_backward_cpu = &layer::On<cpu_attention, gpt_attention_backward>::call;
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("gpt_attention_forward", TORCH_BOX(attnjourney::gpt_attention_forward_cpu));
  m.impl("gpt_attention_backward", TORCH_BOX(attnjourney::gpt_attention_backward_cpu));
}
