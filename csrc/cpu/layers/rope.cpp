// CPU entry of rope: the operator over the CPU's rotation.
#include "layers/rope_boxed.h"

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  using Operators = attnjourney::RopeOperators<attnjourney::cpu_rotary>;
  m.impl("rope", TORCH_BOX(&Operators::out_of_place));
  m.impl("rope_", TORCH_BOX(&Operators::in_place));
}
