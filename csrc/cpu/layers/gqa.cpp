// CPU entry of gqa.
#include "layers/gqa_boxed.h"

namespace attnjourney {
constexpr GqaBackend cpu_gqa = {cpu_attention, cpu_rotary};
}

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  using Operators = attnjourney::GqaOperators<attnjourney::cpu_gqa>;
  m.impl("gqa_forward", TORCH_BOX(&Operators::forward));
  m.impl("gqa_backward", TORCH_BOX(&Operators::backward));
}
