// CPU entry of mla.
#include "layers/mla_boxed.h"

namespace attnjourney {
constexpr MlaBackend cpu_mla = {cpu_attention, cpu_rotary, cpu_rms_norm};
}

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  using Operators = attnjourney::MlaOperators<attnjourney::cpu_mla>;
  m.impl("mla_forward", TORCH_BOX(&Operators::forward));
  m.impl("mla_backward", TORCH_BOX(&Operators::backward));
}
