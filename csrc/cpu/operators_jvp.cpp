// CPU registration of the derivatives of attention and of its backward.
#include "attention/boxed_jvp.h"

namespace attnjourney {
namespace {
using Derivatives = AttentionDerivatives<cpu_attention>;
}
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("attention_jvp", TORCH_BOX(&attnjourney::Derivatives::jvp));
  m.impl("attention_backward_jvp", TORCH_BOX(&attnjourney::Derivatives::backward_jvp));
  m.impl("varlen_attention_jvp", TORCH_BOX(&attnjourney::Derivatives::varlen_jvp));
  m.impl("varlen_attention_backward_jvp", TORCH_BOX(&attnjourney::Derivatives::varlen_backward_jvp));
}
