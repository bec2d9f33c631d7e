// The layer operators and rope on CUDA: their device-neutral halves once more, since the libraries share no symbols,
// over this library's attention and row kernels. Schemas are the CPU library's; products go to ATen.
#include "cuda/schemas_off.h"
//
#include "layers/gpt_attention.cpp"
#include "layers/gqa.cpp"
#include "layers/mha.cpp"
#include "layers/mla.cpp"
#include "layers/mla_backward.cpp"
#include "layers/rope.cpp"
#include "layers/rotary.cpp"
//
#include "cuda/schemas_on.h"

#include "cuda/attention/attention_cuda.h"
#include "layer_operators.h"
#include "layers/rope_boxed.h"
#include "rows_cuda.h"

namespace attnjourney {
constexpr GqaBackend cuda_gqa = {cuda_attention, cuda_rotary};
constexpr MlaBackend cuda_mla = {cuda_attention, cuda_rotary, cuda_rms_norm};
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_IMPL(attnjourney, CUDA, m) {
  using namespace attnjourney;
  LayerOperators<cuda_attention, cuda_gqa, cuda_mla>::register_in(m, "");
  m.impl("rope", TORCH_BOX(&RopeOperators<cuda_rotary>::out_of_place));
  m.impl("rope_", TORCH_BOX(&RopeOperators<cuda_rotary>::in_place));
}
