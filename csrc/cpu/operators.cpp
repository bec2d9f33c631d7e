// CPU registration of the attention operators.
#include "attention/boxed.h"

namespace attnjourney {
namespace {
using Operators = AttentionOperators<cpu_attention>;
}
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&attnjourney::Operators::forward));
  m.impl("attention_backward", TORCH_BOX(&attnjourney::Operators::backward));
  m.impl("varlen_attention_forward", TORCH_BOX(&attnjourney::Operators::varlen_forward));
  m.impl("varlen_attention_backward", TORCH_BOX(&attnjourney::Operators::varlen_backward));
}
