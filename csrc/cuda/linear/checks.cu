// The device-neutral half of linear attention, once more: the libraries share no symbols. Its schemas are the CPU
// library's.
#include "cuda/schemas_off.h"
//
#include "linear/linear_attention.cpp"
//
#include "cuda/schemas_on.h"

#include "linear/linear_attention_boxed.h"
#include "served.h"

// The checks of a CUDA call alone, for tensors anywhere: what is refused can be tested without a GPU.
namespace attnjourney {
namespace {

void check(const LinearCall& c, const LinearInputs&, const Tensor&, const Tensor&, const Tensor&, const Tensor&) {
  check_served(c);
}
constexpr LinearBackend checks{check, nullptr};

}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def(
      "_cuda_linear_check(Tensor query, Tensor key, Tensor value, Tensor? key_padding_mask=None, "
      "Tensor? initial_state=None, Tensor? initial_normalizer=None, *, int feature_map=2, bool is_causal=True, "
      "float scale=1.0, bool normalize=True, float eps=1e-06) -> (Tensor, Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("_cuda_linear_check", TORCH_BOX(&attnjourney::LinearOperators<attnjourney::checks>::forward));
}
