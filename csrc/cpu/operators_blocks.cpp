// CPU registration of attention under a mask of blocks, and of its derivatives.
#include "attention/block_attention_boxed.h"

namespace attnjourney {
namespace {
using BlockOperators = BlockAttentionOperators<cpu_attention>;
}
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("block_attention_forward", TORCH_BOX(&attnjourney::BlockOperators::forward));
  m.impl("block_attention_backward", TORCH_BOX(&attnjourney::BlockOperators::backward));
  m.impl("block_attention_jvp", TORCH_BOX(&attnjourney::BlockOperators::jvp));
  m.impl("block_attention_backward_jvp", TORCH_BOX(&attnjourney::BlockOperators::backward_jvp));
}
