// The device-neutral half of attention, once more: the libraries share no symbols. Its schemas are the CPU library's.
#include "cuda/schemas_off.h"
//
#include "attention/attention.cpp"
#include "attention/block_mask.cpp"
#include "attention/operators.cpp"
//
#include "cuda/schemas_on.h"

#include "attention/block_attention_boxed.h"
#include "served.h"

// The checks of a CUDA call alone, for tensors anywhere: what is refused can be tested without a GPU.
namespace attnjourney {
namespace {

template <bool Backward>
void check(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options, Tensor&,
           Tensor&) {
  check_served(check_attention(query, key, value, options), options, Backward);
}
constexpr AttentionBackend forward_checks{check<false>, nullptr}, backward_checks{check<true>, nullptr};

}  // namespace
}  // namespace attnjourney

#define ATTNJOURNEY_CHECK(name)                                                                            \
  name "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "            \
       "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, " ATTNJOURNEY_ATTENTION_OPTIONS \
       ") -> (Tensor, Tensor)"

STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def(ATTNJOURNEY_CHECK("_cuda_forward_check"));
  m.def(ATTNJOURNEY_CHECK("_cuda_backward_check"));
  m.def(
      "_cuda_block_check(Tensor query, Tensor key, Tensor value, Tensor block_offsets, Tensor block_index, "
      "Tensor block_partial, Tensor block_elements, float dropout_p=0.0, bool is_causal=False, *, "
      "float? scale=None, bool enable_gqa=False, " ATTNJOURNEY_ATTENTION_OPTIONS ") -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("_cuda_forward_check", TORCH_BOX(&attnjourney::AttentionOperators<attnjourney::forward_checks>::forward));
  m.impl("_cuda_backward_check", TORCH_BOX(&attnjourney::AttentionOperators<attnjourney::backward_checks>::forward));
  m.impl("_cuda_block_check", TORCH_BOX(&attnjourney::BlockAttentionOperators<attnjourney::forward_checks>::forward));
}
