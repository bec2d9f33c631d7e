// The device-neutral half of decoding and of the caches, once more, and the checks of a CUDA
// call alone, for tensors anywhere.
#include "cuda/schemas_off.h"
//
#include "decode/decode.cpp"
#include "decode/kv_cache.cpp"
//
#include "cuda/schemas_on.h"

#include "decode/decode_boxed.h"
#include "decode_cuda.h"

namespace attnjourney {
namespace {
void check(const DecodeCall& c, const DecodeInputs& in, const Tensor&, const Tensor&) { check_decode_served(c, in); }
}  // namespace
}  // namespace attnjourney

STABLE_TORCH_LIBRARY_FRAGMENT(attnjourney, m) {
  m.def(
      "_cuda_decode_check(Tensor query, Tensor key, Tensor value, Tensor lengths, *, Tensor? block_table=None, bool "
      "ring=False, " ATTNJOURNEY_DECODE_OPTIONS ") -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(attnjourney, CPU, m) {
  m.impl("_cuda_decode_check", TORCH_BOX(&attnjourney::boxed_decode<attnjourney::check>));
}
