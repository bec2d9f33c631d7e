// CUDA registration of the attention operators.
#include "attention/block_attention_boxed.h"
#include "cuda/attention/attention_cuda.h"

namespace attnjourney {
namespace {
using Operators = AttentionOperators<cuda_attention>;
using BlockOperators = BlockAttentionOperators<cuda_attention>;
}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&attnjourney::Operators::forward));
  m.impl("attention_backward", TORCH_BOX(&attnjourney::Operators::backward));
  m.impl("varlen_attention_forward", TORCH_BOX(&attnjourney::Operators::varlen_forward));
  m.impl("varlen_attention_backward", TORCH_BOX(&attnjourney::Operators::varlen_backward));
  m.impl("block_attention_forward", TORCH_BOX(&attnjourney::BlockOperators::forward));
  m.impl("block_attention_backward", TORCH_BOX(&attnjourney::BlockOperators::backward));
}
